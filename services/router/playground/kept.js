"use strict";
/** The prompt's text with the tokens that a method kept: stronger where more layers kept a token, and for the
 * token under the pointer, or reached by the arrow keys, which layers those are. */

/** Byte-level vocabularies write a byte as its own character where that is printable, else as one from 256 on. */
const BYTE_OF = (() => {
  const table = new Map();
  let other = 256;
  for (let byte = 0; byte < 256; byte++) {
    const isPrintable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
    table.set(String.fromCodePoint(isPrintable ? byte : other++), byte);
  }
  return table;
})();

/** The texts of a vocabulary's entries; words of a vocabulary without spaces are separated by one. */
function tokenTexts(spellings) {
  const decoder = new TextDecoder();
  const decode = (bytes) => decoder.decode(new Uint8Array(bytes), { stream: true });
  if (spellings.some((spelling) => spelling.includes("Ġ"))) {
    return spellings.map((spelling) => {
      const bytes = [...spelling].map((character) => BYTE_OF.get(character));
      return bytes.includes(undefined) ? spelling : decode(bytes);
    });
  }
  if (spellings.some((spelling) => spelling.startsWith("▁"))) {
    return spellings.map((spelling) => {
      const byte = /^<0x([0-9A-F]{2})>$/.exec(spelling);
      return byte ? decode([parseInt(byte[1], 16)]) : spelling.replaceAll("▁", " ");
    });
  }
  return spellings.map((spelling) => `${spelling} `);
}

const MOST_RUNS = 8;

/** Neighbouring layers that keep as much of a token are named together. */
function layersOf(byLayer, bin) {
  const runs = [];
  byLayer.forEach((layer, index) => {
    const share = Math.ceil(layer[bin] * 100);
    if (runs.at(-1)?.share === share) runs.at(-1).to = index;
    else runs.push({ share, from: index, to: index });
  });
  const kept = runs.filter(({ share }) => share > 0);
  if (!kept.length) return "no layer keeps it";
  const count = kept.reduce((sum, { from, to }) => sum + to - from + 1, 0);
  const names = kept.map(({ share, from, to }) => `${from === to ? from : `${from}–${to}`}${share < 100 ? ` (${share} %)` : ""}`);
  const rest = names.length > MOST_RUNS ? " and others" : "";
  return `${count} of ${byLayer.length} layers keep it: ${names.slice(0, MOST_RUNS).join(", ")}${rest}`;
}

/** Args: texts: of the prompt's tokens; kv: the answer's report, with `kept_by_layer`; name of the method.
 *
 * Returns: the node, and `mark`, which shows the place of the answer. */
function keptText(texts, kv, name) {
  const bins = kv.kept.length;
  const words = make("div", { class: "words", tabindex: "0", role: "group",
    "aria-label": `Tokens that ${name} kept; arrow keys move from one to the next` });
  const told = make("p", { class: "told", role: "status" }, "Point at a word, or use the arrow keys, to see which layers keep it.");
  const binOf = (token) => Math.floor((token * bins) / texts.length);
  words.append(...texts.map((text, token) => {
    const word = make("span", { "data-token": token }, text);
    word.style.setProperty("--kept", `${(kv.kept[binOf(token)] * 35).toFixed(0)}%`);
    return word;
  }));
  let shown = -1;
  const show = (token) => {
    if (token < 0 || token >= texts.length || token === shown) return;
    words.children[shown]?.classList.remove("shown");
    shown = token;
    words.children[shown].classList.add("shown");
    told.textContent = `“${texts[token].trim()}”: ${layersOf(kv.kept_by_layer, binOf(token))}`;
  };
  words.addEventListener("mousemove", ({ target, movementX, movementY }) => {
    // Not where the text moved under a pointer that rests.
    if ((movementX || movementY) && target.dataset.token !== undefined) show(Number(target.dataset.token));
  });
  words.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show(shown + step);
    words.children[shown]?.scrollIntoView({ block: "nearest" });
  });
  const mark = ({ from, to }) => {
    for (let token = from; token < to; token++) words.children[token].classList.add("answer");
    words.scrollTop = words.children[from].offsetTop - words.clientHeight / 3;
    show(from);
    told.textContent = `The answer stands here. ${told.textContent}`;
  };
  const node = make("div", { class: "kept" });
  node.append(told, words);
  return { node, mark };
}
