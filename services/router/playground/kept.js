"use strict";
/** The prompt's text with the tokens that a method kept: stronger where more layers kept a token, and for the
 * token under the pointer, or reached by the arrow keys, which layers those are. */

const SPACES = [["Ġ", " "], ["▁", " "], ["Ċ", "\n"]];

/** The texts of a vocabulary's entries; words of a vocabulary without spaces are separated by one. */
function tokenTexts(spellings) {
  const spaced = spellings.some((spelling) => /^[Ġ▁]/.test(spelling));
  return spellings.map((spelling) => {
    const text = SPACES.reduce((shown, [mark, space]) => shown.replaceAll(mark, space), spelling);
    return spaced ? text : `${text} `;
  });
}

function layersOf(byLayer, bin) {
  const kept = byLayer.map((layer, index) => ({ index, share: layer[bin] })).filter(({ share }) => share > 0);
  if (!kept.length) return "no layer keeps it";
  const names = kept.map(({ index, share }) => (share < 1 ? `${index} (${(share * 100).toFixed(0)} %)` : `${index}`));
  return `${kept.length} of ${byLayer.length} layers keep it: ${names.join(", ")}`;
}

/** Args: spellings of the prompt's tokens; kv: the answer's report, with `kept_by_layer`; name of the method. */
function keptText(spellings, kv, name) {
  const byLayer = kv.kept_by_layer;
  const bins = kv.kept.length;
  const texts = tokenTexts(spellings);
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
    told.textContent = `“${texts[token].trim()}”: ${layersOf(byLayer, binOf(token))}`;
  };
  words.addEventListener("mouseover", (event) => {
    if (event.target.dataset.token !== undefined) show(Number(event.target.dataset.token));
  });
  words.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show(shown + step);
    words.children[shown]?.scrollIntoView({ block: "nearest" });
  });
  const node = make("div", { class: "kept" });
  node.append(words, told);
  return node;
}
