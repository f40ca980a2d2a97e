"use strict";
/** Two methods on one question, side by side: answer, bytes, first token, and the kept tokens on the text. */

const EVERY_TOKEN = 4096;

/** Run one of the methods. Returns: its tokens on the text, and where its answer stands there. */
async function compared(body, method, texts, question, column) {
  const message = newAnswer();
  const answer = make("p", { class: "answer" });
  column.append(make("h2", {}, method), answer);
  const turn = await streamAnswer(
    { ...body, kv_compression: compressionOf(method), kv_kept_bins: EVERY_TOKEN }, message,
    () => { answer.textContent = message.content || message.reasoning; });
  if (message.notice) column.append(make("p", { class: "notice" }, message.notice));
  column.append(make("p", { class: "facts" }, message.facts));
  if (!turn.kept) return null;
  const kept = keptText(texts, turn, method);
  column.append(kept.node);
  return { kept, place: placeOf(texts, question, message.content) };
}

/** Run both, one after the other, so that neither waits for the other's turn. Neither is part of the session.
 *
 * The place where more of an answer stands is shown in both, so one sees what became of it. */
async function compare(body, methods, question) {
  const { model, messages, tools, document_ids } = body;
  const tokens = await post("/tokenize", { model, messages, tools, document_ids, return_token_strs: true });
  const texts = tokenTexts(tokens.token_strs);
  const pair = make("div", { class: "comparison", role: "group", "aria-label": `${methods.join(" and ")} compared` });
  hint.remove();
  $("log").append(pair);
  const columns = [];
  for (const method of methods) {
    const column = make("section", { "aria-label": `Answer with ${method}` });
    pair.append(column);
    pair.scrollIntoView({ block: "start" });
    columns.push(await compared(body, method, texts, question, column));
  }
  const there = columns.filter(Boolean);
  const [place] = there.map((column) => column.place).filter(Boolean).sort((one, other) => other.letters - one.letters);
  if (place) for (const { kept } of there) kept.mark(place);
  pair.scrollIntoView({ block: "start" });
}
