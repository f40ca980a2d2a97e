"use strict";
/** Two methods on one question, side by side: answer, bytes, first token, and the kept tokens on the text. */

const EVERY_TOKEN = 4096;

async function compared(body, method, spellings, column) {
  const started = performance.now();
  const answer = make("p", { class: "answer" });
  column.append(make("h2", {}, method), answer);
  let first = null;
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(), signal: running.signal,
    body: JSON.stringify({ ...body, kv_compression: compressionOf(method), kv_kept_bins: EVERY_TOKEN }),
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const chunk of chunksOf(response)) {
    const text = chunk.choices[0]?.delta?.content;
    if (text) {
      first ??= performance.now() - started;
      answer.textContent += text;
    }
    if (!chunk.kv) continue;
    column.append(make("p", { class: "facts" }, factsOf({ ...chunk.kv, ttftMs: first })));
    if (chunk.kv.kept) column.append(keptText(spellings, chunk.kv, method));
  }
}

/** Runs both, one after the other, so that neither waits for the other's turn. Neither is part of the session. */
async function compare(body, methods) {
  const response = await fetch("/tokenize", {
    method: "POST", headers: headers(),
    body: JSON.stringify({ model: body.model, messages: body.messages, return_token_strs: true,
      ...(body.tools ? { tools: body.tools } : {}), ...(body.document_ids ? { document_ids: body.document_ids } : {}) }),
  });
  const tokens = await response.json();
  if (!response.ok) throw new Error(tokens.error.message);
  const article = make("article", { class: "comparison" });
  hint.remove();
  $("log").append(article);
  for (const method of methods) {
    const column = make("section", { "aria-label": `Answer with ${method}` });
    article.append(column);
    await compared(body, method, tokens.token_strs, column);
    article.scrollIntoView({ block: "nearest" });
  }
}
