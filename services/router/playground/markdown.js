"use strict";
/** Markdown as DOM nodes. Text never becomes HTML, so an answer cannot add elements, handlers or styles. */

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\n]+)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/g;

function inlineNodes(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, match.index));
    end = match.index + match[0].length;
    const [, code, strong, emphasis, label, address] = match;
    if (code !== undefined) nodes.push(make("code", {}, code));
    else if (strong !== undefined) nodes.push(make("strong", {}, strong));
    else if (emphasis !== undefined) nodes.push(make("em", {}, emphasis));
    else nodes.push(make("a", { href: address, rel: "noopener noreferrer", target: "_blank" }, label));
  }
  nodes.push(text.slice(end));
  return nodes.filter((node) => node !== "");
}

function filled(tag, text) {
  const node = make(tag);
  node.append(...inlineNodes(text));
  return node;
}

/** Headings, lists, fenced code and paragraphs. */
function markdownNodes(text) {
  const nodes = [];
  const lines = text.split("\n");
  let paragraph = [];
  const endParagraph = () => {
    if (paragraph.length) nodes.push(filled("p", paragraph.join("\n")));
    paragraph = [];
  };
  for (let at = 0; at < lines.length; at++) {
    const line = lines[at];
    const item = /^\s*(?:[-*+]|(\d+)[.)])\s+(.*)$/.exec(line);
    const heading = /^#{1,6}\s+(.*)$/.exec(line);
    if (line.startsWith("```")) {
      endParagraph();
      const code = [];
      while (++at < lines.length && !lines[at].startsWith("```")) code.push(lines[at]);
      const block = make("pre", { tabindex: "0", role: "region", "aria-label": "Code" });
      block.append(make("code", {}, code.join("\n")));
      nodes.push(block);
    } else if (heading) {
      endParagraph();
      nodes.push(filled("p", heading[1]));
      nodes.at(-1).className = "heading";
    } else if (item) {
      endParagraph();
      const tag = item[1] ? "ol" : "ul";
      if (nodes.at(-1)?.localName !== tag) nodes.push(make(tag));
      nodes.at(-1).append(filled("li", item[2]));
    } else if (line.trim()) paragraph.push(line);
    else endParagraph();
  }
  endParagraph();
  return nodes;
}
