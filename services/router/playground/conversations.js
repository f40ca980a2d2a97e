"use strict";
/** Conversations in the browser's storage, so that they survive a reload. The server has them as sessions,
 * which may expire before: a turn sends the whole conversation, and the server reuses what it still has. */

const CONVERSATIONS = "kvferry-conversations";
const CURRENT = "kvferry-current";
const MAX_CONVERSATIONS = 30;
const TITLE_CHARACTERS = 48;

function storedConversations() {
  try {
    return JSON.parse(localStorage.getItem(CONVERSATIONS)) ?? [];
  } catch {
    return [];
  }
}

function writeConversations(conversations) {
  for (let count = Math.min(conversations.length, MAX_CONVERSATIONS); count > 0; count--) {
    try {
      localStorage.setItem(CONVERSATIONS, JSON.stringify(conversations.slice(0, count)));
      return;
    } catch { /* no room: the oldest one goes */ }
  }
  localStorage.removeItem(CONVERSATIONS);
}

function newConversation(id) {
  return { id, system: "", tools: "", documents: [], messages: [], turns: [] };
}

function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  return (first?.shown ?? first?.content ?? "New conversation").slice(0, TITLE_CHARACTERS);
}

function storeConversation(conversation) {
  const others = storedConversations().filter((stored) => stored.id !== conversation.id);
  writeConversations(conversation.messages.length ? [conversation, ...others] : others);
  localStorage.setItem(CURRENT, conversation.id);
}

function forgetConversation(id) {
  writeConversations(storedConversations().filter((conversation) => conversation.id !== id));
}

/** Args: sessions: the server's; choose: called with a conversation, or with the id of one on the server only. */
function conversationItems(sessions, currentId, choose) {
  const stored = storedConversations();
  const known = new Set(stored.map((conversation) => conversation.id));
  const entries = [
    ...stored.map((conversation) => [
      conversation.id, titleOf(conversation), formatCount(conversation.turns.length, "turn"), () => choose(conversation)]),
    ...sessions.filter((session) => !known.has(session.id)).map((session) =>
      [session.id, session.id, `${formatCount(session.turns, "turn")}, on the server`, () => choose(session.id)]),
  ];
  return entries.map(([id, title, detail, open]) => {
    const button = make("button", { type: "button", "data-id": id }, title);
    if (id === currentId) button.setAttribute("aria-current", "true");
    button.append(make("span", { class: "detail" }, detail));
    button.addEventListener("click", open);
    const item = make("li");
    item.append(button);
    return item;
  });
}
