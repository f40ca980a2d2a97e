"use strict";
/** Calls to the router, as any client makes them. */

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** Throws: what the server says is wrong, with the answer's `status`. */
async function call(path, { method = "GET", body, signal } = {}) {
  const response = await fetch(path, { method, signal, headers: headers(), body: body && JSON.stringify(body) });
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  throw Object.assign(new Error(told.error?.message ?? `${path} answered ${response.status}`), { status: response.status });
}

const get = async (path) => (await call(path)).json();

const post = async (path, body) => (await call(path, { method: "POST", body })).json();

/** The chunks of a streamed answer. */
async function* chunksOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffered += value;
    const events = buffered.split("\n\n");
    buffered = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
