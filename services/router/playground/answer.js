"use strict";
/** One answer of the model: its parts as they arrive, what it cost and how it ended. */

const LEAST_MS = 20; // a shorter time tells no rate: parts of an answer may arrive together
const ENDINGS = { stop: "ended by itself", tool_calls: "ended with a call" };

/** Args: message: gets the answer; show: called after each part of it. Returns: the turn's figures. */
async function streamAnswer(body, message, show) {
  const started = performance.now();
  const gaps = [];
  let first = null, last = null, turn = null;
  try {
    const response = await call("/v1/chat/completions", { method: "POST", body, signal: running.signal });
    message.finish = "broken";
    for await (const chunk of chunksOf(response)) {
      const [choice] = chunk.choices;
      const delta = choice?.delta ?? {};
      if (delta.content || delta.reasoning_content || delta.tool_calls) {
        const now = performance.now();
        if (first === null) first = now;
        else gaps.push(now - last);
        last = now;
        addPart(message, delta);
        show();
      }
      if (choice?.finish_reason) message.finish = choice.finish_reason;
      if (!chunk.kv) continue;
      const tokens = chunk.usage.completion_tokens;
      turn = {
        ...chunk.kv, tokens, finish: message.finish, itlMs: median(gaps),
        ttftMs: first === null ? null : first - started,
        tokensPerS: last - first >= LEAST_MS ? ((tokens - 1) * 1000) / (last - first) : null,
      };
    }
  } catch (error) {
    if (error.name === "AbortError") message.finish = "aborted";
    throw error;
  } finally {
    message.notice = noticeOf(message.finish, body.max_tokens, turn);
  }
  if (!turn) throw new Error("The answer ended without its figures.");
  message.facts = factsOf(turn);
  return turn;
}

function addPart(message, delta) {
  message.content += delta.content ?? "";
  message.reasoning += delta.reasoning_content ?? "";
  for (const added of delta.tool_calls ?? []) {
    const { id, type, function: called } = added;
    if (!id) message.calls[added.index].function.arguments += called.arguments;
    else message.calls[added.index] = { id, type, function: called };
  }
}

const newAnswer = () => ({ role: "assistant", content: "", reasoning: "", calls: [] });

/** A sentence where the answer is not whole. */
function noticeOf(finish, limit, turn) {
  if (finish === "aborted") return "You stopped this answer.";
  if (finish === "broken") return "This answer broke off.";
  if (finish !== "length") return "";
  return turn?.max_tokens
    ? "This answer was cut: the model's context is full."
    : `This answer was cut at the limit of ${formatCount(limit, "token")}. Raise the answer limit in the settings, and regenerate.`;
}

/** How a turn ended. Turns of earlier versions of the page do not say. */
function endingOf({ finish, tokens }) {
  return finish === "length" ? `cut after ${formatCount(tokens, "token")}` : ENDINGS[finish] ?? "–";
}

const formatRate = (rate) => rate.toFixed(rate < 10 ? 1 : 0);

function factsOf(turn) {
  const reason = turn.reason ? ` (${turn.reason})` : "";
  const rate = turn.tokensPerS ? ` at ${formatRate(turn.tokensPerS)} a second` : "";
  const share = formatShare(turn.shipped_bytes / turn.full_bytes);
  return `${turn.method}${reason}: shipped ${formatBytes(turn.shipped_bytes)} of ${formatBytes(turn.full_bytes)}, ${share}; ` +
    `${turn.reused_tokens} of ${turn.prompt_tokens} prompt tokens reused; first token after ${formatMs(turn.ttftMs)}; ` +
    `${formatCount(turn.tokens, "token")}${rate}; ${endingOf(turn)}`;
}
