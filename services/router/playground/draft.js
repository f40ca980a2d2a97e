"use strict";
/** The message that is being written: a question, a result of a call, the example, or an edit of an earlier message. */

/** The message that the draft will replace, with all that follows it. */
let edited = null;

/** The tool calls of the last answer that have no result yet. */
function openCalls() {
  const at = conversation.messages.findLastIndex((message) => message.role === "assistant");
  const results = new Set(conversation.messages.slice(at + 1).map((message) => message.callId));
  return (conversation.messages[at]?.calls ?? []).filter((call) => !results.has(call.id));
}

function showExpected() {
  const [call] = openCalls();
  $("message").placeholder = call
    ? `Result of ${call.function.name}(${call.function.arguments})`
    : "Message (Enter sends, Shift+Enter makes a line)";
}

/** The draft as a message. */
function drafted() {
  const text = $("message").value.trim();
  const documentText = $("document").value.trim();
  const [call] = edited ? [] : openCalls();
  if (call) return { role: "tool", content: text, callId: call.id };
  const content = documentText ? `${documentText}\n\n${text}` : text;
  return { role: "user", content, ...(documentText ? { shown: text, document: documentText } : {}) };
}

function setDraft(message, documentText) {
  $("message").value = message;
  $("document").value = documentText;
  showDocumentSize();
}

function showDocumentSize() {
  const { length } = $("document").value.trim();
  $("document-size").textContent = length ? `(${formatCount(length, "character")})` : "";
}

/** Fill the form with the server's example: a document, a question about it and a small budget. */
async function loadExample() {
  const { messages: [{ content }], kv_compression: compression, max_tokens: limit } = await get("/example");
  const at = content.lastIndexOf("\n\n");
  setDraft(content.slice(at + 2), content.slice(0, at));
  await ensureServer();
  setField("method", compression.method);
  setField("budget-kind", compression.token_budget ? "token_budget" : "");
  if (compression.token_budget) setField("budget", compression.token_budget);
  // The example's limit is for its answer alone; a longer one serves the next questions, too.
  if (limit > Number($("max-tokens").value)) setField("max-tokens", limit);
  $("message").focus();
}

/** Put an earlier message into the form again. What follows it stays until the draft is sent. */
function beginEdit(message) {
  checkIdle();
  if (!conversation.messages.includes(message)) throw new Error("This message was not answered; send it again.");
  setEdited(message);
  setDraft(message.shown ?? message.content, message.document ?? "");
  $("message").focus();
}

function setEdited(message) {
  edited = message;
  $("editing").hidden = message === null;
}

function cancelEdit() {
  setEdited(null);
  setDraft("", "");
}

/** The messages before the draft's place in the conversation. */
function messagesBefore() {
  const { messages } = conversation;
  return edited ? messages.slice(0, messages.indexOf(edited)) : messages;
}

/** Drop the messages from an index on, and their turns. Returns: what brings them back. */
function rewind(index) {
  const { messages, turns } = conversation;
  conversation.messages = messages.slice(0, index);
  conversation.turns = turns.slice(0, conversation.messages.filter((message) => message.facts).length);
  // The session on the server still has them; the next turn replaces it.
  conversation.isRewound = true;
  return () => Object.assign(conversation, { messages, turns });
}
