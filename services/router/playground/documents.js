"use strict";
/** The server's documents, which a conversation may begin with. */

async function refreshDocuments() {
  const documents = await get("/v1/documents");
  $("documents").replaceChildren(...documents.data.map((stored) => {
    const box = make("input", { type: "checkbox", value: stored.id });
    box.checked = conversation.documents.includes(stored.id);
    box.addEventListener("change", () => {
      conversation.documents = [...document.querySelectorAll("#documents input:checked")].map((one) => one.value);
    });
    const label = make("label");
    label.append(box, ` ${stored.id}, ${formatCount(stored.tokens, "token")}`);
    return label;
  }));
}

/** Prefill the pasted text once, for conversations to begin with. */
async function storeDocument() {
  const text = $("document").value.trim();
  if (!text) throw new Error("Paste the document's text first.");
  const stored = await post("/v1/documents", { text });
  conversation.documents = [...conversation.documents, stored.id];
  setDraft($("message").value, "");
  await refreshDocuments();
}
