// The built-in page: a chat over the server's own API. What a model says only ever becomes text nodes.
"use strict";

const byId = (id) => document.getElementById(id);
const log = byId("log"), input = byId("input"), state = byId("status");
const KEY = "moewe-api-key";
let model = null, messages = [], running = null, key = storedKey();

class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function storedKey() {
  try { return sessionStorage.getItem(KEY); } catch { return null; }
}

async function ask(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (key) headers.authorization = "Bearer " + key;
  const response = await fetch(path, { ...options, headers, credentials: "same-origin", cache: "no-store" });
  if (response.ok) return response;
  let message = "the server answered " + response.status;
  try { message = (await response.json()).error.message; } catch { /* not one of our errors */ }
  throw new Refusal(response.status, message);
}

function show(kind, text) {
  const element = document.createElement("div");
  element.className = "message " + kind;
  element.textContent = text;
  log.append(element);
  log.scrollTop = log.scrollHeight;
  return element;
}

function showError(error) {
  if (error.status === 401) wantKey();
  else show("error", error.message).setAttribute("role", "alert");
}

function wantKey() {
  byId("key-form").hidden = false;
  state.textContent = key ? "That key is not accepted." : "";
  byId("key").focus();
}

async function connect() {
  byId("forget").hidden = !key;
  try {
    const cards = await (await ask("v1/models")).json();
    model = cards.data[0].id;
    byId("model").textContent = model;
    byId("key-form").hidden = true;
    state.textContent = "";
    input.focus();
  } catch (error) {
    if (error.status === 401) {
      byId("model").textContent = "no key yet";
      return wantKey();
    }
    byId("model").textContent = error.status === 503 ? error.message : "no connection to the server";
    setTimeout(connect, 2000);
  }
}

// Calls `take` with the content of each server-sent event until [DONE].
async function eachEvent(response, take) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the answer broke off");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const data = part.slice(6);
      if (data === "[DONE]") return;
      take(JSON.parse(data));
    }
  }
}

function body() {
  const asked = { model, messages, stream: true, stream_options: { include_usage: true } };
  const temperature = byId("temperature").value, most = byId("max-tokens").value;
  if (temperature !== "") asked.temperature = Number(temperature);
  if (most !== "") asked.max_tokens = Number(most);
  return JSON.stringify(asked);
}

function setRunning(controller) {
  running = controller;
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  log.setAttribute("aria-busy", String(running !== null));
}

function rate(tokens, began) {
  const seconds = (performance.now() - began) / 1000;
  return tokens + " tokens, " + (seconds > 0 ? tokens / seconds : 0).toFixed(1) + " tokens/s";
}

async function send(text) {
  const conversation = messages;
  conversation.push({ role: "user", content: text });
  const question = show("user", text);
  setRunning(new AbortController());
  const stopper = running;
  let answer = null, thoughts = null, content = "", pieces = 0, first = null, failure = null;

  const append = (element, kind, piece) => {
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    const target = element || show(kind, "");
    target.append(piece);
    if (atEnd) log.scrollTop = log.scrollHeight;
    return target;
  };
  const take = (chunk) => {
    if (chunk.error) throw new Error(chunk.error.message);
    const delta = chunk.choices.length ? chunk.choices[0].delta : {};
    if (delta.reasoning_content) thoughts = append(thoughts, "reasoning", delta.reasoning_content);
    if (delta.content) {
      content += delta.content;
      answer = append(answer, "assistant", delta.content);
    }
    if (delta.content || delta.reasoning_content) {
      pieces += 1;
      if (first === null) first = performance.now();
      else state.textContent = rate(pieces, first);
    }
    if (chunk.usage && first !== null) state.textContent = rate(chunk.usage.completion_tokens, first);
  };
  state.textContent = "waiting";
  try {
    const headers = { "content-type": "application/json" };
    await eachEvent(await ask("v1/chat/completions", { method: "POST", headers, body: body(), signal: stopper.signal }), take);
    if (first === null) state.textContent = "the answer is empty";
  } catch (error) {
    failure = error;
  }
  setRunning(null);
  if (conversation !== messages) return;  // a new chat began meanwhile
  if (content !== "") messages.push({ role: "assistant", content });
  if (failure !== null && failure.name === "AbortError") {
    state.textContent = "stopped" + (first === null ? "" : ": " + rate(pieces, first));
  } else if (failure !== null) {
    state.textContent = "";
    showError(failure);
  }
  if (content === "" && failure !== null) {
    messages.pop();  // nobody answered: the question goes back to where it can be sent again
    question.remove();
    if (input.value === "") input.value = text;
  }
  if (byId("key-form").hidden) input.focus();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = input.value.trim();
  if (text === "" || running !== null || model === null) return;
  input.value = "";
  send(text);
});
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running !== null) running.abort();
});
byId("stop").addEventListener("click", () => { if (running !== null) running.abort(); });
byId("clear").addEventListener("click", () => {
  if (running !== null) running.abort();
  messages = [];
  log.replaceChildren();
  state.textContent = "";
  input.focus();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  try { sessionStorage.setItem(KEY, key); } catch { /* storage is off: it is kept until a reload */ }
  byId("key").value = "";
  connect();
});
byId("forget").addEventListener("click", () => {
  try { sessionStorage.removeItem(KEY); } catch { /* nothing was kept */ }
  key = model = null;
  connect();
});
byId("metrics").addEventListener("click", async (event) => {
  if (!key) return;
  event.preventDefault();  // the link would carry no key
  try {
    const text = await (await ask("metrics")).text();
    window.open(URL.createObjectURL(new Blob([text], { type: "text/plain" })), "_blank", "noopener");
  } catch (error) {
    showError(error);
  }
});
connect();
