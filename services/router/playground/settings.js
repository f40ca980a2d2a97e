"use strict";
/** The settings. Those that were changed are in the browser's storage, so that they survive a reload. */

const SETTINGS = "kvferry-settings";
const REMEMBERED = ["method", "other-method", "budget-kind", "budget", "max-tokens", "temperature"];
const THOUGHT_TOKENS = 2048; // an answer's limit where the model thinks first
const BUDGETS = {
  token_budget: { value: 256, min: 1, step: 1, text: (value) => formatCount(Number(value), "token") },
  retention: { value: 0.1, min: 0.01, max: 1, step: 0.01, text: (value) => `${value} of the prompt` },
  quality: { value: 0.95, min: 0.01, max: 1, step: 0.01, text: (value) => `quality ${value}` },
};

function settings() {
  try {
    return JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    return {};
  }
}

function remember(name, value) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify({ ...settings(), [name]: value }));
  } catch { /* no room, or no storage: it lasts until the page is closed */ }
}

/** Set a field as a person would. */
function setField(id, value) {
  $(id).value = value;
  remember(id, $(id).value);
  if (id === "budget-kind") {
    showBudget();
    remember("budget", $("budget").value);
  }
  showSettings();
}

/** Set what was stored; methods are chosen once the server has listed them. */
function restoreSettings() {
  const stored = settings();
  if (stored.theme) document.documentElement.dataset.theme = stored.theme;
  for (const id of ["budget-kind", "max-tokens", "temperature"]) $(id).value = stored[id] ?? $(id).value;
  showBudget();
  $("budget").value = stored.budget ?? $("budget").value;
}

/** Show the field of the chosen kind of budget, with that kind's limits and usual value. */
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

/** Say in the line that is always visible what is chosen, and what the method does. */
function showSettings() {
  const method = $("method").value;
  if (!method) return;
  const { [$("budget-kind").value]: kind } = BUDGETS;
  const budget = kind && !withoutBudget.has(method) ? kind.text($("budget").value) : "its own budget";
  $("settings-line").textContent = `${method}, ${withoutBudget.has(method) ? "no budget" : budget}`;
  $("method-line").textContent = lineOf(method);
}

function compressionOf(method) {
  const kind = $("budget-kind").value;
  return { method, ...(kind && !withoutBudget.has(method) ? { [kind]: Number($("budget").value) } : {}) };
}

function switchTheme() {
  const { dataset } = document.documentElement;
  const isDark = dataset.theme ? dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  dataset.theme = isDark ? "light" : "dark";
  remember("theme", dataset.theme);
}

/** Open the settings at the key, once for each key that the server refuses. */
function askForKey() {
  const key = $("key").value.trim();
  $("error").textContent = key
    ? "The server does not know this API key."
    : "This server asks for an API key: enter it in the settings.";
  if (refusedKey === key) return;
  refusedKey = key;
  $("settings").open = true;
  $("key").focus();
}
