"use strict";
/** What the turns moved: bytes, kept tokens and times. */

function showTurns() {
  const { turns } = conversation;
  $("no-turns").hidden = turns.length > 0;
  showChart();
  $("strips").replaceChildren(...turns.map(stripOf).filter(Boolean).reverse());
  $("turns").replaceChildren(...turns.map((turn, index) => {
    const row = make("tr");
    const cells = [turn.method, turn.prompt_tokens, turn.reused_tokens, formatBytes(turn.full_bytes),
      formatBytes(turn.shipped_bytes), `${(turn.full_bytes / turn.shipped_bytes).toFixed(1)}×`,
      formatMs(turn.ttftMs), formatMs(turn.itlMs), turn.tokensPerS ? formatRate(turn.tokensPerS) : "–", endingOf(turn)];
    row.append(make("th", { scope: "row" }, String(index + 1)), ...cells.map((cell) => make("td", {}, String(cell))));
    return row;
  }));
}

function showChart() {
  const chart = $("chart");
  const { turns } = conversation;
  if (!turns.length) {
    chart.setAttribute("aria-label", "No turns yet");
    chart.replaceChildren();
    return;
  }
  const width = 400, height = 130, base = height - 16;
  const largest = Math.max(...turns.flatMap((turn) => [turn.full_bytes, turn.shipped_bytes]));
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

/** Why the kept rows have another share of the tokens than of the bytes. */
function whyUnlike(turn, kept, shipped) {
  if (turn.delta_bytes !== undefined) return ", as decode had other rows already";
  if (shipped < 0.9 * kept) return ", as a kept row has fewer bits";
  return shipped > 1.1 * kept ? ", as a kept row was shipped in more bits" : "";
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
  const kept = turn.kept.reduce((sum, fraction) => sum + fraction, 0) / turn.kept.length;
  const shipped = turn.shipped_bytes / turn.full_bytes;
  const text = `Turn ${index + 1}, ${turn.method}: ${formatShare(kept)} of the rows kept, ` +
    `${formatShare(shipped)} of the bytes shipped${whyUnlike(turn, kept, shipped)}`;
  svg.setAttribute("aria-label", text);
  strip.append(make("p", {}, text), svg);
  return strip;
}
