"use strict";
const $ = (id) => document.getElementById(id);
const KEPT_BINS = 96;
const BUDGETS = {
  token_budget: { value: 256, min: 1, step: 1 },
  retention: { value: 0.1, min: 0.01, max: 1, step: 0.01 },
  quality: { value: 0.95, min: 0.01, max: 1, step: 0.01 },
};
const OTHER_METHOD = "streamingllm";
const hint = $("hint");
let conversation = newConversation("");
let modelName = "";
let withoutBudget = new Set();
let running = null;

// ---- small helpers ----

function make(tag, attributes = {}, text = "") {
  const node = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return node;
}

function formatBytes(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  for (const unit of ["kB", "MB", "GB"]) {
    bytes /= 1000;
    if (bytes < 999.5 || unit === "GB") return `${bytes.toPrecision(3)} ${unit}`;
  }
}

const formatMs = (ms) => (ms === null ? "–" : ms < 1000 ? `${ms.toFixed(ms < 10 ? 1 : 0)} ms` : `${(ms / 1000).toFixed(2)} s`);

function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function get(path) {
  const response = await fetch(path, { headers: headers() });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error?.message ?? `${path} answered ${response.status}`);
  return body;
}

function showError(error) {
  $("error").textContent = error ? error.message ?? String(error) : "";
}

// ---- server, methods, sessions ----

async function loadServer() {
  const [models, methods] = await Promise.all([get("/v1/models"), get("/v1/methods")]);
  modelName = models.data[0].id;
  $("model").textContent = `${modelName}, context ${models.data[0].max_model_len.toLocaleString()} tokens`;
  withoutBudget = new Set(methods.data.filter((method) => method.token_budget === null && method.retention === null)
    .map((method) => method.id));
  const chosen = $("method").value;
  $("method").replaceChildren(...methods.data.map((method) => {
    const option = make("option", { value: method.id }, method.default ? `${method.id} (default)` : method.id);
    option.selected = chosen ? chosen === method.id : method.default;
    return option;
  }));
  const other = $("other-method").value || OTHER_METHOD;
  $("other-method").replaceChildren(...methods.data.map((method) => make("option", { value: method.id }, method.id)));
  if (methods.data.some((method) => method.id === other)) $("other-method").value = other;
  await refreshDocuments();
}

async function refreshReady() {
  let state = "not ready";
  try {
    if ((await fetch("/ready")).ok) state = "ready";
    if (state === "ready" && !modelName) await loadServer();
  } catch (error) {
    if (state === "ready") showError(error);
  }
  if ($("ready").dataset.state === state) return;
  $("ready").dataset.state = state;
  $("ready").textContent = state;
}

async function refreshSessions() {
  const sessions = await get("/v1/sessions");
  $("sessions").replaceChildren(...sessions.data.map((session) =>
    make("option", { value: session.id }, `${session.turns} turns, ${session.tokens} tokens`)));
  $("conversations").replaceChildren(...conversationItems(sessions.data, conversation.id, (chosen) =>
    (typeof chosen === "string" ? openSession(chosen) : open(chosen)).then(() => showError(null), showError)));
}

function newSession() {
  const random = crypto.getRandomValues(new Uint32Array(2));
  conversation = newConversation(`play-${random[0].toString(36)}${random[1].toString(36)}`);
  showConversation();
  $("message").focus();
}

/** Show a conversation of this browser. */
async function open(chosen) {
  if (running) throw new Error("An answer is running; stop it first.");
  conversation = chosen;
  localStorage.setItem(CURRENT, conversation.id);
  showConversation();
  await refreshSessions();
}

/** Show a session that only the server has. */
async function openSession(id) {
  const file = await get(`/v1/sessions/${encodeURIComponent(id)}/export`);
  const messages = file.messages.map(({ role, content }) => ({ role, content }));
  await open({ ...newConversation(id), messages, documents: file.document_ids });
}

function showConversation() {
  $("session").value = conversation.id;
  $("system").value = conversation.system;
  $("tools").value = conversation.tools;
  $("instructions").open = Boolean(conversation.system || conversation.tools);
  for (const box of document.querySelectorAll("#documents input")) box.checked = conversation.documents.includes(box.value);
  $("log").replaceChildren(...(conversation.messages.length ? [] : [hint]));
  for (const message of conversation.messages) showMessage(message);
  showTurns();
  showExpected();
}

async function deleteSession() {
  const id = $("session").value.trim();
  const response = await fetch(`/v1/sessions/${encodeURIComponent(id)}`, { method: "DELETE", headers: headers() });
  if (!response.ok && response.status !== 404) throw new Error((await response.json()).error.message);
  forgetConversation(id);
  newSession();
  await refreshSessions();
}

// ---- one turn ----

function toolsOf(conversation) {
  if (!conversation.tools.trim()) return {};
  try {
    return { tools: JSON.parse(conversation.tools) };
  } catch (error) {
    throw new Error(`The tools are no JSON: ${error.message}`);
  }
}

function compressionOf(method) {
  const kind = $("budget-kind").value;
  return { method, ...(kind && !withoutBudget.has(method) ? { [kind]: Number($("budget").value) } : {}) };
}

/** Args: added: messages after those of the conversation. */
function requestBody(added) {
  const system = conversation.system.trim() ? [{ role: "system", content: conversation.system.trim() }] : [];
  return {
    model: modelName,
    messages: [...system, ...[...conversation.messages, ...added].map(sent)],
    ...toolsOf(conversation),
    ...(conversation.documents.length ? { document_ids: conversation.documents } : {}),
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    kv_compression: compressionOf($("method").value),
    kv_kept_bins: KEPT_BINS,
  };
}

/** A message as the server takes it. */
function sent({ role, content, calls, callId }) {
  return { role, content, ...(calls?.length ? { tool_calls: calls } : {}), ...(callId ? { tool_call_id: callId } : {}) };
}

async function* chunksOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffered += value;
    const events = buffered.split("\n\n");
    buffered = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

async function runTurn(added, shown) {
  const started = performance.now();
  const message = { role: "assistant", content: "", reasoning: "", calls: [] };
  let last = null;
  let timeToFirst = null;
  const gaps = [];
  const session = { session_id: $("session").value.trim() };
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(), signal: running.signal,
    body: JSON.stringify({ ...requestBody(added), ...(session.session_id ? session : {}) }),
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  try {
    for await (const chunk of chunksOf(response)) {
      const delta = chunk.choices[0]?.delta ?? {};
      if (delta.content || delta.reasoning_content || delta.tool_calls) {
        const now = performance.now();
        if (last === null) timeToFirst = now - started;
        else gaps.push(now - last);
        last = now;
        message.content += delta.content ?? "";
        message.reasoning += delta.reasoning_content ?? "";
        for (const added of delta.tool_calls ?? []) {
          const { id, type, function: called } = added;
          if (!id) message.calls[added.index].function.arguments += called.arguments;
          else message.calls[added.index] = { id, type, function: called };
        }
        showAnswer(shown, message);
      }
      if (chunk.kv) {
        const { kept_by_layer: _, ...kv } = chunk.kv;
        const turn = { ...kv, ttftMs: timeToFirst, itlMs: median(gaps) };
        conversation.turns.push(turn);
        message.facts = factsOf(turn);
        showAnswer(shown, message);
        showTurns();
      }
    }
  } finally {
    if (message.content || message.calls.length) {
      conversation.messages.push(...added, message);
      storeConversation(conversation);
    }
  }
}

/** The tool calls of the last answer that have no result yet. */
function openCalls() {
  const at = conversation.messages.findLastIndex((message) => message.role === "assistant");
  const results = new Set(conversation.messages.slice(at + 1).map((message) => message.callId));
  return (conversation.messages[at]?.calls ?? []).filter((call) => !results.has(call.id));
}

function showExpected() {
  const [call] = openCalls();
  $("message").placeholder = call
    ? `Result of ${call.function.name}(${call.function.arguments})`
    : "Message (Enter sends, Shift+Enter makes a line)";
}

/** The draft as messages: a question, or the result of a call. */
function drafted() {
  const text = $("message").value.trim();
  const documentText = $("document").value.trim();
  const [call] = openCalls();
  if (call) return { role: "tool", content: text, callId: call.id };
  const content = documentText ? `${documentText}\n\n${text}` : text;
  return { role: "user", content, ...(documentText ? { shown: text, document: documentText } : {}) };
}

function factsOf(turn) {
  const reason = turn.reason ? ` (${turn.reason})` : "";
  return `${turn.method}${reason}: shipped ${formatBytes(turn.shipped_bytes)} of ${formatBytes(turn.full_bytes)}, ` +
    `${turn.reused_tokens} of ${turn.prompt_tokens} prompt tokens reused, first token after ${formatMs(turn.ttftMs)}`;
}

/** Fill the form with the server's example: a document, a question about it and a token budget. */
async function loadExample() {
  const example = await get("/example");
  const [documentText, question] = example.messages[0].content.split("\n\n");
  setDraft(question, documentText);
  if (!modelName) await loadServer();
  $("method").value = example.kv_compression.method;
  $("budget-kind").value = "token_budget";
  showBudget();
  $("budget").value = example.kv_compression.token_budget;
  $("max-tokens").value = example.max_tokens;
  $("message").focus();
}

function setDraft(message, documentText) {
  $("message").value = message;
  $("document").value = documentText;
  $("paste").open = documentText !== "";
  showDocumentSize();
}

/** Run something that has an answer; Esc and the button stop it. */
async function busy(work) {
  showError(null);
  running = new AbortController();
  for (const id of ["send", "compare"]) $(id).disabled = true;
  $("stop").disabled = false;
  try {
    if (!modelName) await loadServer();
    await work();
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  } finally {
    running = null;
    for (const id of ["send", "compare"]) $(id).disabled = false;
    $("stop").disabled = true;
    $("message").focus();
  }
}

async function send(event) {
  event.preventDefault();
  if (!$("message").value.trim() || running) return;
  const message = drafted();
  const draft = [$("message").value, $("document").value];
  if (message.role === "tool" && openCalls().length > 1) {
    conversation.messages.push(message);
    showMessage(message);
    setDraft("", "");
    showExpected();
    return;
  }
  const question = showMessage(message);
  const answer = showMessage({ role: "assistant", content: "" });
  answer.article.classList.add("pending");
  setDraft("", "");
  await busy(async () => {
    try {
      await runTurn([message], answer);
    } catch (error) {
      if (!conversation.messages.includes(message)) {
        question.article.remove();
        answer.article.remove();
        setDraft(...draft);
      }
      throw error;
    } finally {
      answer.article.classList.remove("pending");
    }
    showExpected();
    await refreshSessions();
  });
}

/** The draft, or the last question, with both chosen methods. */
async function sendCompared() {
  if (running) return;
  const isDraft = $("message").value.trim() !== "";
  const last = conversation.messages.findLastIndex((message) => message.role === "user");
  if (!isDraft && last < 0) {
    showError("Write a question, or load the example, to compare methods on it.");
    return;
  }
  await busy(() => {
    const body = requestBody(isDraft ? [drafted()] : []);
    if (!isDraft) body.messages.splice(body.messages.length - (conversation.messages.length - last - 1));
    return compare(body, [$("method").value, $("other-method").value]);
  });
}

// ---- controls ----

function showBudget() {
  const limits = BUDGETS[$("budget-kind").value];
  const input = $("budget");
  input.hidden = !limits;
  if (!limits) return;
  for (const name of ["min", "max", "step"]) {
    if (limits[name] === undefined) input.removeAttribute(name);
    else input.setAttribute(name, limits[name]);
  }
  input.value = limits.value;
}

function showDocumentSize() {
  const length = $("document").value.trim().length;
  $("document-size").textContent = length ? `(${length.toLocaleString()} characters)` : "";
}

function switchTheme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
}

$("form").addEventListener("submit", send);
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("theme").addEventListener("click", switchTheme);
$("example").addEventListener("click", () => loadExample().then(() => showError(null), showError));
$("new-session").addEventListener("click", newSession);
$("session").addEventListener("change", () => {
  conversation = newConversation($("session").value.trim());
  showConversation();
});
for (const name of ["system", "tools"]) $(name).addEventListener("input", () => { conversation[name] = $(name).value; });
$("compare").addEventListener("click", sendCompared);
$("store-document").addEventListener("click", () => storeDocument().then(() => showError(null), showError));
$("delete-session").addEventListener("click", () => deleteSession().then(() => showError(null), showError));
$("budget-kind").addEventListener("change", showBudget);
$("document").addEventListener("input", showDocumentSize);
$("key").addEventListener("change", () => {
  sessionStorage.setItem("kvferry-key", $("key").value);
  modelName = "";
  refreshReady();
});
$("file").addEventListener("change", async () => {
  const file = $("file").files[0];
  if (!file) return;
  $("document").value = await file.text();
  showDocumentSize();
});

$("key").value = sessionStorage.getItem("kvferry-key") ?? "";
const former = storedConversations().find((stored) => stored.id === localStorage.getItem(CURRENT));
if (former) {
  conversation = former;
  showConversation();
} else newSession();
refreshReady().then(() => modelName && refreshSessions()).catch(showError);
setInterval(refreshReady, 5000);
