"use strict";
/** Messages in the log. */

const AUTHORS = { user: "You", tool: "Result", assistant: "Model", system: "System" };

/** Args: message: its `content`, or what is `shown` of it; a document before it; `calls`, `reasoning`, `facts`. */
function showMessage(message) {
  hint.remove();
  const article = make("article", { class: `turn ${message.role}` });
  article.append(make("span", { class: "who" }, AUTHORS[message.role] ?? message.role));
  if (message.document) {
    const { length } = message.document;
    article.append(make("span", { class: "document" },
      `Document, ${formatCount(length, "character")}: ${message.document.slice(0, 160)}${length > 160 ? "…" : ""}`));
  }
  const thought = make("details", { class: "thought" });
  const body = make("div", { class: "body" });
  article.append(thought, body);
  $("log").append(article);
  const shown = { article, thought, body };
  showAnswer(shown, message);
  return shown;
}

/** What there is so far of a message. */
function showAnswer({ article, thought, body }, message) {
  thought.hidden = !message.reasoning;
  if (message.reasoning) thought.replaceChildren(make("summary", {}, "Thoughts"), make("p", {}, message.reasoning));
  const text = message.shown ?? message.content ?? "";
  body.replaceChildren(...(message.role === "assistant" ? markdownNodes(text) : [text]));
  for (const call of message.calls ?? []) {
    body.append(make("p", { class: "call" }, `calls ${call.function.name}(${call.function.arguments})`));
  }
  article.querySelector(".after")?.remove();
  const after = [];
  if (message.notice) after.push(make("p", { class: "notice" }, message.notice));
  if (message.facts) after.push(make("p", { class: "facts" }, message.facts));
  const buttons = buttonsOf(message);
  if (buttons.length) {
    const row = make("div", { class: "buttons" });
    row.append(...buttons);
    after.push(row);
  }
  if (after.length) {
    const node = make("div", { class: "after" });
    node.append(...after);
    article.append(node);
  }
  $("log").scrollTop = $("log").scrollHeight;
}

function buttonsOf(message) {
  if (message.role === "user") return [makeButton("edit", "Edit", () => beginEdit(message))];
  if (message.role !== "assistant" || !(message.facts || message.notice)) return [];
  const copy = makeButton("copy", "Copy", async () => {
    await copyText(message.content);
    copy.textContent = "Copied";
  });
  return [copy, makeButton("regenerate", "Regenerate", regenerate)];
}
