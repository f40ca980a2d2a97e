"use strict";
/** Nodes of the page, and numbers as people read them. */

const $ = (id) => document.getElementById(id);

function make(tag, attributes = {}, text = "") {
  const node = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return node;
}

function makeButton(name, text, act) {
  const button = make("button", { type: "button", class: name }, text);
  button.addEventListener("click", () => tried(act));
  return button;
}

/** Do something for a person, who sees what is wrong with it. */
async function tried(act) {
  showError(null);
  try {
    await act();
  } catch (error) {
    showError(error);
  }
}

/** Args: error: null, or what was thrown, or a sentence. An answer that a person stopped is no error. */
function showError(error) {
  if (error?.name === "AbortError") return;
  if (error?.status === 401) askForKey();
  else $("error").textContent = error ? error.message ?? String(error) : "";
}

function formatBytes(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  for (const unit of ["kB", "MB", "GB"]) {
    bytes /= 1000;
    if (bytes < 999.5 || unit === "GB") return `${bytes.toPrecision(3)} ${unit}`;
  }
}

function formatMs(ms) {
  if (ms === null) return "–";
  return ms < 1000 ? `${ms.toFixed(ms < 10 ? 1 : 0)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

const formatShare = (share) => `${(share * 100).toFixed(1)} %`;

const formatCount = (count, noun) => `${count.toLocaleString()} ${noun}${count === 1 ? "" : "s"}`;

function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}

/** Copy a text, also on a page over plain HTTP from another machine, which has no clipboard interface. */
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", { class: "visually-hidden", "aria-label": "Text to copy" });
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  if (!isCopied) throw new Error("The browser did not let the page copy; select the text instead.");
}
