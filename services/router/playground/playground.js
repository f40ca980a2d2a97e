"use strict";
/** The page: the server's state, the conversation that is shown, and what its buttons do. */

const KEPT_BINS = 96;
const hint = $("hint");
let conversation = newConversation("");
let modelName = "";
let withoutBudget = new Set();
let running = null;
let refusedKey = null;

// ---- server, sessions ----

async function loadServer() {
  const [models, methods] = await Promise.all([get("/v1/models"), get("/v1/methods")]);
  const [model] = models.data;
  const fitting = methods.data.filter((method) => model.methods.includes(method.id));
  modelName = model.id;
  $("model").textContent = `${modelName}, context ${formatCount(model.max_model_len, "token")}`;
  hint.querySelector("#demo-words").hidden = modelName !== "demo";
  withoutBudget = new Set(fitting.filter((method) => method.token_budget === null && method.retention === null)
    .map((method) => method.id));
  if (model.capabilities.thinking.supported && !settings()["max-tokens"]) $("max-tokens").value = THOUGHT_TOKENS;
  fillMethods(fitting);
  showSettings();
  await refreshDocuments();
}

async function ensureServer() {
  if (!modelName) await loadServer();
}

async function refreshReady() {
  let state = "not ready";
  try {
    if ((await fetch("/ready")).ok) state = "ready";
    if (state === "ready" && refusedKey !== $("key").value.trim()) await ensureServer();
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
    make("option", { value: session.id }, `${formatCount(session.turns, "turn")}, ${formatCount(session.tokens, "token")}`)));
  $("conversations").replaceChildren(...conversationItems(sessions.data, conversation.id, (chosen) =>
    tried(() => (typeof chosen === "string" ? openSession(chosen) : open(chosen)))));
}

/** Begin a conversation. Args: id: of its session; a new one has a name that no other has here. */
function begin(id) {
  const listed = [...$("sessions").options].map((option) => option.value);
  const stored = storedConversations().map((known) => known.id);
  conversation = newConversation(id ?? newName(new Set([...listed, ...stored])));
  showConversation();
}

/** Show a conversation of this browser. */
async function open(chosen) {
  checkIdle();
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
  setEdited(null);
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
  checkIdle();
  const id = $("session").value.trim();
  await call(`/v1/sessions/${encodeURIComponent(id)}`, { method: "DELETE" }).catch((error) => {
    if (error.status !== 404) throw error;
  });
  forgetConversation(id);
  begin();
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

/** Args: messages: all of the conversation's that the model reads. */
function requestBody(messages) {
  const system = conversation.system.trim() ? [{ role: "system", content: conversation.system.trim() }] : [];
  return {
    model: modelName,
    messages: [...system, ...messages.map(sent)],
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

/** Args: added: messages after those of the conversation; shown: where the answer appears. */
async function runTurn(added, shown) {
  const message = newAnswer();
  const own = conversation;
  const id = $("session").value.trim();
  const session = { session_id: id, ...(own.isRewound ? { session_mode: "replace" } : {}) };
  const body = { ...requestBody([...own.messages, ...added]), ...(id ? session : {}) };
  try {
    const { kept_by_layer: _, ...turn } = await streamAnswer(body, message, () => showAnswer(shown, message));
    own.turns.push(turn);
    delete own.isRewound;
  } finally {
    if (message.content || message.calls.length || message.facts) {
      own.messages.push(...added, message);
      storeConversation(own);
      showAnswer(shown, message);
      showTurns();
    }
  }
}

function checkIdle() {
  if (running) throw new Error("An answer is running; stop it first.");
}

/** Run something that has an answer; Esc and the button stop it. */
async function busy(work) {
  running = new AbortController();
  for (const id of ["send", "compare"]) $(id).disabled = true;
  $("stop").disabled = false;
  await tried(work);
  running = null;
  for (const id of ["send", "compare"]) $(id).disabled = false;
  $("stop").disabled = true;
  $("message").focus({ preventScroll: true });
}

/** Show the answer to the messages as it arrives. Args: undo: called where nothing of it came. */
async function answered(added, undo) {
  const answer = showMessage(newAnswer());
  answer.article.classList.add("pending");
  await busy(async () => {
    const { length } = conversation.messages;
    try {
      await ensureServer();
      await runTurn(added, answer);
    } finally {
      answer.article.classList.remove("pending");
      if (conversation.messages.length === length) {
        answer.article.remove();
        undo();
      }
    }
    showExpected();
    await refreshSessions();
  });
}

async function send() {
  if (!$("message").value.trim() || running) return;
  const draft = [$("message").value, $("document").value];
  const message = drafted();
  const replaced = edited;
  let restore = null;
  if (replaced) {
    restore = rewind(messagesBefore().length);
    showConversation();
  } else if (message.role === "tool" && openCalls().length > 1) {
    conversation.messages.push(message);
    showMessage(message);
    setDraft("", "");
    showExpected();
    return;
  }
  const question = showMessage(message);
  setDraft("", "");
  await answered([message], () => {
    question.article.remove();
    setDraft(...draft);
    if (!replaced) return;
    restore();
    showConversation();
    setEdited(replaced);
  });
}

/** Ask the last question again, with the settings as they are now. */
async function regenerate() {
  checkIdle();
  const restore = rewind(conversation.messages.findLastIndex((message) => message.role === "assistant"));
  showConversation();
  await answered([], () => {
    restore();
    showConversation();
  });
}

/** The draft, or the last question, with both chosen methods. */
async function sendCompared() {
  checkIdle();
  const isDraft = $("message").value.trim() !== "";
  const messages = isDraft
    ? [...messagesBefore(), drafted()]
    : conversation.messages.slice(0, conversation.messages.findLastIndex((message) => message.role === "user") + 1);
  const question = messages.at(-1);
  if (!question) throw new Error("Write a question, or load the example, to compare methods on it.");
  // Of a question without a document of its own, the end: the rest may be one.
  const asked = question.shown ?? question.content.slice(-200);
  await busy(async () => {
    await ensureServer();
    await compare(requestBody(messages), [$("method").value, $("other-method").value], asked);
  });
}

// ---- controls ----

const clicked = (id, act) => $(id).addEventListener("click", () => tried(act));

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  tried(send);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  tried(send);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else if (edited) cancelEdit();
});
clicked("stop", () => running?.abort());
clicked("cancel-edit", cancelEdit);
clicked("theme", switchTheme);
clicked("example", loadExample);
clicked("new-session", () => {
  checkIdle();
  begin();
  $("message").focus();
});
clicked("compare", sendCompared);
clicked("store-document", storeDocument);
clicked("delete-session", deleteSession);
$("session").addEventListener("change", () => tried(() => {
  checkIdle();
  begin($("session").value.trim());
}));
for (const name of ["system", "tools"]) $(name).addEventListener("input", () => { conversation[name] = $(name).value; });
for (const name of REMEMBERED) $(name).addEventListener("change", () => setField(name, $(name).value));
$("document").addEventListener("input", showDocumentSize);
$("key").addEventListener("change", () => tried(async () => {
  sessionStorage.setItem("kvferry-key", $("key").value);
  modelName = "";
  await loadServer();
  await refreshSessions();
}));
$("file").addEventListener("change", async () => {
  const file = $("file").files[0];
  if (!file) return;
  $("document").value = await file.text();
  showDocumentSize();
});

$("key").value = sessionStorage.getItem("kvferry-key") ?? "";
restoreSettings();
const former = storedConversations().find((stored) => stored.id === localStorage.getItem(CURRENT));
if (former) {
  conversation = former;
  showConversation();
} else begin();
$("message").focus();
refreshReady().then(() => modelName && refreshSessions()).catch(showError);
setInterval(refreshReady, 5000);
