"use strict";
/** Names of new sessions that a person can read and say. */

const ADJECTIVES = ["amber", "brave", "bright", "calm", "clear", "early", "fair", "gentle", "golden", "green", "happy", "kind",
  "light", "lucky", "merry", "misty", "noble", "patient", "quiet", "rapid", "round", "silver", "steady", "sunny", "swift",
  "tall", "tidy", "warm", "white", "wide", "wise", "young"];
const NOUNS = ["anchor", "bay", "beach", "bridge", "canal", "cliff", "coast", "current", "delta", "dock", "ferry", "fjord",
  "harbour", "island", "jetty", "lagoon", "lake", "lighthouse", "mast", "mill", "oar", "pier", "quay", "reef", "river",
  "rope", "sail", "shore", "stream", "tide", "wave", "wharf"];

/** Args: taken: names of the sessions that there are. */
function newName(taken) {
  for (;;) {
    const [adjective, noun, number] = crypto.getRandomValues(new Uint32Array(3));
    const name = `${ADJECTIVES[adjective % ADJECTIVES.length]}-${NOUNS[noun % NOUNS.length]}-${1000 + (number % 9000)}`;
    if (!taken.has(name)) return name;
  }
}
