"use strict";
const $ = (id) => document.getElementById(id);
const KEPT_BINS = 96;
const BUDGETS = {
  token_budget: { value: 256, min: 1, step: 1 },
  retention: { value: 0.1, min: 0.01, max: 1, step: 0.01 },
  quality: { value: 0.95, min: 0.01, max: 1, step: 0.01 },
};
const hint = $("hint");
const turns = [];
let modelName = "";
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
  const chosen = $("method").value;
  $("method").replaceChildren(...methods.data.map((method) => {
    const option = make("option", { value: method.id }, method.default ? `${method.id} (default)` : method.id);
    option.selected = chosen ? chosen === method.id : method.default;
    return option;
  }));
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
}

function newSession() {
  const random = crypto.getRandomValues(new Uint32Array(2));
  $("session").value = `play-${random[0].toString(36)}${random[1].toString(36)}`;
  clearTurns();
  $("message").focus();
}

function clearTurns() {
  turns.length = 0;
  $("log").replaceChildren(hint);
  showTurns();
}

async function deleteSession() {
  const id = $("session").value.trim();
  const response = await fetch(`/v1/sessions/${encodeURIComponent(id)}`, { method: "DELETE", headers: headers() });
  if (!response.ok) throw new Error((await response.json()).error.message);
  clearTurns();
  await refreshSessions();
}

// ---- one turn ----

function requestBody(content) {
  const kind = $("budget-kind").value;
  const compression = { method: $("method").value };
  if (kind) compression[kind] = Number($("budget").value);
  const session = $("session").value.trim();
  return {
    model: modelName,
    messages: [{ role: "user", content }],
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    kv_compression: compression,
    kv_kept_bins: KEPT_BINS,
    ...(session ? { session_id: session, session_mode: "append" } : {}),
  };
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

function addMessage(role, text, documentText) {
  hint.remove();
  const article = make("article", { class: `turn ${role}` });
  article.append(make("span", { class: "who" }, role === "user" ? "You" : "Model"));
  if (documentText) {
    article.append(make("span", { class: "document" },
      `Document, ${documentText.length.toLocaleString()} characters: ${documentText.slice(0, 160)}${documentText.length > 160 ? "…" : ""}`));
  }
  const body = make("span", {}, text);
  article.append(body);
  $("log").append(article);
  $("log").scrollTop = $("log").scrollHeight;
  return { article, body };
}

async function runTurn(content, answer) {
  const started = performance.now();
  let last = null;
  let timeToFirst = null;
  const gaps = [];
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(requestBody(content)), signal: running.signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const chunk of chunksOf(response)) {
    const text = chunk.choices[0]?.delta?.content;
    if (text) {
      const now = performance.now();
      if (last === null) timeToFirst = now - started;
      else gaps.push(now - last);
      last = now;
      answer.body.textContent += text;
      $("log").scrollTop = $("log").scrollHeight;
    }
    if (chunk.kv) {
      turns.push({ ...chunk.kv, ttftMs: timeToFirst, itlMs: median(gaps) });
      answer.article.append(make("span", { class: "facts" }, factsOf(turns.at(-1))));
      showTurns();
    }
  }
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

async function send(event) {
  event.preventDefault();
  const message = $("message").value.trim();
  if (!message || running) return;
  const documentText = $("document").value.trim();
  showError(null);
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  const question = addMessage("user", message, documentText);
  const answer = addMessage("assistant", "", "");
  answer.article.classList.add("pending");
  setDraft("", "");
  try {
    if (!modelName) await loadServer();
    await runTurn(documentText ? `${documentText}\n\n${message}` : message, answer);
    await refreshSessions();
  } catch (error) {
    if (error.name === "AbortError") answer.body.textContent += " (stopped)";
    else {
      showError(error);
      if (!answer.body.textContent) {
        question.article.remove();
        answer.article.remove();
        setDraft(message, documentText);
      }
    }
  } finally {
    answer.article.classList.remove("pending");
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    $("message").focus();
  }
}

// ---- what the turns moved ----

function showTurns() {
  showChart();
  $("strips").replaceChildren(...turns.map(stripOf).filter(Boolean));
  $("turns").replaceChildren(...turns.map((turn, index) => {
    const row = make("tr");
    const cells = [turn.method, turn.prompt_tokens, turn.reused_tokens, formatBytes(turn.full_bytes),
      formatBytes(turn.shipped_bytes), `${(turn.full_bytes / turn.shipped_bytes).toFixed(1)}×`,
      formatMs(turn.ttftMs), formatMs(turn.itlMs)];
    row.append(make("th", { scope: "row" }, String(index + 1)), ...cells.map((cell) => make("td", {}, String(cell))));
    return row;
  }));
}

function showChart() {
  const chart = $("chart");
  if (!turns.length) {
    chart.setAttribute("aria-label", "No turns yet");
    chart.replaceChildren();
    return;
  }
  const width = 400, height = 150, base = height - 16, largest = Math.max(...turns.map((turn) => turn.full_bytes));
  const slot = Math.min(width / turns.length, 80), bar = slot * 0.36;
  const svg = make("svg:svg", { viewBox: `0 0 ${width} ${height}` });
  turns.forEach((turn, index) => {
    const x = index * slot + slot * 0.12;
    for (const [kind, bytes, at] of [["full", turn.full_bytes, x], ["shipped", turn.shipped_bytes, x + bar + 2]]) {
      const tall = Math.max(1, (bytes / largest) * (base - 14));
      svg.append(make("svg:rect", { class: `bar-${kind}`, x: at, y: base - tall, width: bar, height: tall, rx: 1.5 }));
    }
    svg.append(make("svg:text", { x: x + bar, y: height - 3, "text-anchor": "middle" }, String(index + 1)));
  });
  svg.append(make("svg:text", { x: 0, y: 9 }, formatBytes(largest)));
  chart.setAttribute("aria-label", turns.map((turn, index) =>
    `Turn ${index + 1}: ${formatBytes(turn.shipped_bytes)} shipped of ${formatBytes(turn.full_bytes)}`).join(". "));
  chart.replaceChildren(svg);
}

function stripOf(turn, index) {
  if (!turn.kept) return null;
  const strip = make("div", { class: "strip" });
  const svg = make("svg:svg", { viewBox: `0 0 ${turn.kept.length} 1`, preserveAspectRatio: "none", role: "img" });
  turn.kept.forEach((fraction, bin) => {
    const from = Math.ceil((bin * turn.prompt_tokens) / turn.kept.length);
    const rect = make("svg:rect", { x: bin, y: 0, width: 1, height: 1, "fill-opacity": fraction });
    rect.append(make("svg:title", {}, `from token ${from}: ${(fraction * 100).toFixed(0)} % kept`));
    svg.append(rect);
  });
  const mean = turn.kept.reduce((sum, fraction) => sum + fraction, 0) / turn.kept.length;
  const text = `Turn ${index + 1}, ${turn.method}: ${(mean * 100).toFixed(1)} % of ${turn.prompt_tokens} tokens' rows kept`;
  svg.setAttribute("aria-label", text);
  strip.append(make("p", {}, text), svg);
  return strip;
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
$("session").addEventListener("change", clearTurns);
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
newSession();
refreshReady();
setInterval(refreshReady, 5000);
