"use strict";
/** The methods in groups, with a line about each. */

const METHODS = {
  "Selected for the question": {
    rdkv: "tokens and channels at 16 to 0 bits, by what losing them costs",
    "rdkv-union": "as rdkv, also for answers that follow from several lines, as in code",
    "rdkv-draft": "as rdkv, by what a draft of the answer attends to; for short answers",
    "rdkv-hsa": "as rdkv over more tokens, of which each step reads the best",
    rocketkv: "a wide selection, of which each step reads the best; for many turns",
    "rocketkv-kivi": "as rocketkv, in 4 bits",
    "rocketkv-d2o": "as rocketkv, with more rows for layers that attend evenly",
    snapkv: "the rows that the question attends to most",
    "snapkv-kivi": "the rows of snapkv, in 4 bits",
    "snapkv-think": "the rows of snapkv, with a share of the key channels",
    adakv: "as snapkv, but heads share a layer's rows by need",
    pyramidkv: "as snapkv, with more rows in lower layers",
  },
  "Selected before the question is known": {
    "compactor-rdkv": "tokens and channels at 16 to 0 bits, by leverage",
    "compactor-kivi": "the rows of compactor, in 4 bits",
    compactor: "rows by leverage and non-causal attention",
    "compactor-hsa": "as compactor, of which each step reads the best",
    "kvzip-rdkv": "as compactor-rdkv, by what the model reads to repeat the prompt",
    kvzip: "the rows that the model reads to repeat the prompt",
    "keydiff-rdkv": "as compactor-rdkv, by how far keys are from their mean",
    keydiff: "the rows whose keys are far from their mean",
    h2o: "the rows that all queries attend to most, and the latest",
    d2o: "as h2o, with dropped rows merged into similar ones",
  },
  "Every token": {
    full: "the whole KV cache, uncompressed",
    kivi: "every row, in 4 bits",
    think: "every row, with a share of the key channels",
    quest: "every row, of which each step reads the best pages",
    sparq: "every row, of which each step reads the best tokens by estimate",
    "exact-topk": "every row, of which each step reads the very best tokens",
  },
  "For comparison": {
    streamingllm: "the first rows and the last",
    random: "random rows",
  },
};
const COMPARED = "streamingllm";

function lineOf(method) {
  const lines = Object.values(METHODS).find((group) => Object.hasOwn(group, method));
  return lines?.[method] ?? "a method of another package";
}

/** The options of a list of methods, the server's default first. Args: methods: as the server lists them. */
function methodOptions(methods) {
  const rest = new Map(methods.map((method) => [method.id, method]));
  const take = (ids) => ids.filter((id) => rest.delete(id));
  const groups = [["The server's default", take(methods.filter((method) => method.default).map((method) => method.id))]];
  for (const [label, lines] of Object.entries(METHODS)) groups.push([label, take(Object.keys(lines))]);
  groups.push(["Of other packages", [...rest.keys()]]);
  return groups.filter(([, ids]) => ids.length).map(([label, ids]) => {
    const group = make("optgroup", { label });
    group.append(...ids.map((id) => make("option", { value: id }, `${id}: ${lineOf(id)}`)));
    return group;
  });
}

/** Fill both lists of methods, and choose what was chosen before, if it is still there. */
function fillMethods(methods) {
  const standard = methods.find((method) => method.default)?.id ?? "";
  for (const [list, otherwise] of [[$("method"), standard], [$("other-method"), COMPARED]]) {
    const wanted = list.value || settings()[list.id];
    list.replaceChildren(...methodOptions(methods));
    const there = (id) => methods.some((method) => method.id === id);
    list.value = [wanted, otherwise].find(there) ?? methods[0].id;
  }
}
