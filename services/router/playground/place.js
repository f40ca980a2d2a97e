"use strict";
/** Finds the place in a prompt where an answer stands. */

const WORD = /[\p{L}\p{N}]+/gu;
const KNOWN_WORD = 0.01; // what a word of the question counts, next to the letters of any other
const LEAST = 3;

function wordsOf(text) {
  return [...text.matchAll(WORD)].map((match) => ({
    word: match[0].toLowerCase(), from: match.index, to: match.index + match[0].length }));
}

/** The tokens, from the first to behind the last, where the most of the answer stands in one piece.
 *
 * Args: texts: of the prompt's tokens; question: its words are not what was answered.
 * Returns: the tokens, and how many letters of the answer they are; null where nothing of it stands there. */
function placeOf(texts, question, answer) {
  const prompt = wordsOf(texts.join(""));
  const said = wordsOf(answer);
  const known = new Set(wordsOf(question).map(({ word }) => word));
  // By the answer's word: the common piece that ends with it and with the prompt's word at hand.
  const lengths = new Array(said.length + 1).fill(0);
  const values = new Array(said.length + 1).fill(0);
  let best = { value: 0 };
  prompt.forEach(({ word }, at) => {
    for (let index = said.length; index > 0; index--) {
      if (said[index - 1].word !== word) {
        lengths[index] = values[index] = 0;
        continue;
      }
      lengths[index] = lengths[index - 1] + 1;
      values[index] = values[index - 1] + (known.has(word) ? KNOWN_WORD : word.length);
      if (values[index] > best.value) best = { value: values[index], first: at - lengths[index] + 1, last: at };
    }
  });
  if (best.value < LEAST) return null;
  while (known.has(prompt[best.first].word)) best.first++;
  while (known.has(prompt[best.last].word)) best.last--;
  const { from } = prompt[best.first], { to } = prompt[best.last];
  const inside = [];
  let end = 0;
  texts.forEach((text, token) => {
    const begin = end;
    end += text.length;
    if (begin < to && end > from) inside.push(token);
  });
  return { from: inside[0], to: inside.at(-1) + 1, letters: best.value };
}
