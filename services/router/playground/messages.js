"use strict";
/** Messages in the log. */

/** Args: message: its `content`, or what is `shown` of it; a document before it; `calls`, `reasoning`, `facts`. */
function showMessage(message) {
  hint.remove();
  const article = make("article", { class: `turn ${message.role}` });
  const who = { user: "You", tool: "Result", assistant: "Model", system: "System" }[message.role] ?? message.role;
  article.append(make("span", { class: "who" }, who));
  if (message.document) {
    article.append(make("span", { class: "document" },
      `Document, ${message.document.length.toLocaleString()} characters: ${message.document.slice(0, 160)}${message.document.length > 160 ? "…" : ""}`));
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
  if (message.facts) {
    const after = make("div", { class: "after" });
    const copy = make("button", { type: "button", class: "copy" }, "Copy");
    copy.addEventListener("click", () => navigator.clipboard.writeText(text).then(() => { copy.textContent = "Copied"; }, showError));
    after.append(make("span", { class: "facts" }, message.facts), copy);
    article.append(after);
  }
  $("log").scrollTop = $("log").scrollHeight;
}
