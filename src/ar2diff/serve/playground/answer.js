// One answer: asked of the API, read from its stream, drawn pass by pass. Text of users and models is only ever
// put into the page as textContent.

const REPLAY_PAUSE_MS = 140;
const MAX_BARS = 600;

/** What a person is told when something fails. */
export class Fault extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** A response of the API, or a Fault with the API's own message. */
export async function callApi(path, { key, body, signal } = {}) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  const method = body ? "POST" : "GET";
  let response;
  try {
    response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Fault("The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  const message = said?.error?.message ?? `The server answers with status ${response.status}.`;
  const wait = response.headers.get("retry-after");
  throw new Fault(wait ? `${asSentence(message)} Try again in ${wait} s.` : asSentence(message), response.status);
}

/** Ask for a streamed answer and show it in `view`; ends normally only after the stream's own end. */
export async function streamAnswer(asked, view, { key, signal }) {
  const response = await callApi("v1/chat/completions", { key, body: asked, signal });
  for await (const event of readEvents(response)) {
    if (event === "[DONE]") return;
    const piece = JSON.parse(event);
    if (piece.error) throw new Fault(asSentence(piece.error.message));
    view.take(piece);
  }
  throw new Fault("The connection to the server ended in the middle of the answer.");
}

async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let got;
    try {
      got = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      return;
    }
    if (got.done) return;
    const events = (held + got.value).split("\n\n");
    held = events.pop();
    for (const event of events) yield event.slice("data: ".length);
  }
}

/** The picture of one answer. `content` is its settled text, `reasoning` its thinking, `calls` what it calls. */
export class AnswerView {
  constructor(root, name) {
    this.root = root;
    this.part = (selector) => root.querySelector(selector);
    this.part("h3").textContent = name;
    this.isVerified = name === "verified";
    this.steps = [];
    this.cost = null;
    this.numTokens = 0;
    this.firstMs = 0;
    this.calls = [];
    this.clear();
  }

  /** One object of the stream. */
  take(piece) {
    const choice = piece.choices[0];
    if (piece.usage) this.numTokens = piece.usage.completion_tokens;
    if (choice?.diffusion?.pass) {
      const { content: text = "", reasoning_content: thought = "" } = choice.delta;
      const step = { pass: choice.diffusion.pass, text, thought, calls: [] };
      this.steps.push(step);
      this.draw(step);
      this.count();
    }
    for (const part of choice?.delta?.tool_calls ?? []) this.takeCall(part);
    if (choice?.finish_reason) this.cost = { ...choice.diffusion, reason: choice.finish_reason };
  }

  /** A call comes as its name, then its arguments. */
  takeCall({ index, id, function: { name, arguments: written } }) {
    if (id) this.calls[index] = { id, type: "function", function: { name, arguments: "" } };
    const call = this.calls[index];
    call.function.arguments += written;
    if (!written) return;
    this.steps.at(-1)?.calls.push(call);
    this.drawCall(call);
  }

  /** Forget the picture, not the steps. */
  clear() {
    this.tokens = []; // position to {text, odds}, or null for a mask
    this.odds = [];
    this.content = this.reasoning = "";
    this.numSettled = this.numChars = this.numThought = this.numCalled = 0;
    for (const selector of [".settled", ".block", ".strip", ".thought", ".calls"]) this.part(selector).replaceChildren();
    this.part(".thinking").hidden = true;
  }

  draw({ pass, text, thought, calls }) {
    const fresh = new Set();
    for (const { position, logprob } of pass.reveals) {
      this.odds[position] = Math.exp(logprob);
      fresh.add(position);
    }
    this.content += text;
    this.reasoning += thought;
    this.showThinking(!this.content);
    this.tokens.length = Math.min(this.tokens.length, pass.start);
    pass.token_texts.forEach((text, place) => {
      const position = pass.start + place;
      this.tokens[position] = text === null ? null : { text, odds: this.odds[position] };
    });
    this.settle(pass.start);
    const open = this.tokens.slice(this.numSettled);
    const drawn = open.map((token, idx) => (token ? drawOpen(token, fresh.has(this.numSettled + idx)) : drawMask()));
    this.part(".block").replaceChildren(...drawn);
    this.addBar(pass);
    for (const call of calls) this.drawCall(call);
  }

  drawCall({ function: { name, arguments: written } }) {
    const drawn = document.createElement("p");
    const label = document.createElement("strong");
    label.textContent = name;
    drawn.append(label, asArguments(written));
    this.part(".calls").append(drawn);
    this.showThinking(false);
    const open = this.tokens.indexOf(null);
    this.numCalled = open < 0 ? this.tokens.length : open; // up to here tokens may be the call's
  }

  /** Thinking is open while there is nothing else to read, and folded afterwards. */
  showThinking(isOpen) {
    if (!this.reasoning) return;
    const thinking = this.part(".thinking");
    if (thinking.hidden || !isOpen) thinking.open = isOpen;
    thinking.hidden = false;
  }

  /** Move the tokens before `end` out of the block at hand, as far as the API has called their text settled. */
  settle(end) {
    for (; this.numSettled < end; this.numSettled += 1) {
      const token = this.tokens[this.numSettled];
      if (!token) return;
      if (this.place(token, this.reasoning, "numThought", ".thought")) continue;
      if (this.place(token, this.content, "numChars", ".settled")) continue;
      // A mark, a call's text or white space around them is left out, once something behind it is known.
      const rests = [this.reasoning.slice(this.numThought), this.content.slice(this.numChars)].filter(Boolean);
      if (rests.some((rest) => token.text.trimStart().startsWith(rest.trimStart()))) return; // it is not all there yet
      if (!rests.length && this.numSettled >= this.numCalled) return;
    }
  }

  /** Put a token where its text is the next of `text`, white space around it aside; whether it is. */
  place(token, text, counter, selector) {
    const rest = text.slice(this[counter]);
    if (!rest) return false;
    let shown = token.text;
    if (!rest.startsWith(shown)) {
      const core = shown.trim();
      shown = rest.slice(0, rest.length - rest.trimStart().length) + core;
      if (!core || !rest.startsWith(shown)) return false;
    }
    this.part(selector).append(drawToken(shown, token.odds));
    this[counter] += shown.length;
    return true;
  }

  /** Show exactly the settled text: what was open is gone. */
  finish() {
    this.settle(this.tokens.length);
    this.part(".thought").append(this.reasoning.slice(this.numThought));
    this.part(".settled").append(this.content.slice(this.numChars));
    this.numThought = this.reasoning.length;
    this.numChars = this.content.length;
    this.part(".block").replaceChildren();
  }

  addBar(pass) {
    if (this.part(".strip").childElementCount >= MAX_BARS) return;
    const bar = document.createElement("i");
    bar.style.height = `${Math.min(100, 12 * pass.reveals.length)}%`;
    bar.classList.toggle("odd", pass.block_idx % 2 === 1);
    this.part(".strip").append(bar);
  }

  /** Numbers while it runs: counted here. A verified step after the first is a draft and a check. */
  count() {
    const now = performance.now();
    this.firstMs ||= now;
    const known = this.tokens.filter(Boolean).length;
    const seconds = (now - this.firstMs) / 1000;
    const passes = this.isVerified ? 2 * this.steps.length - 1 : this.steps.length;
    this.show({ tokens: known, passes, speed: seconds > 0 ? known / seconds : null }, this.isVerified ? "~" : "");
  }

  /** Numbers at the end: the server's own. */
  countExactly() {
    if (!this.cost) return;
    const { num_forward_passes: passes, decode_s: seconds } = this.cost;
    this.speed = seconds > 0 && this.numTokens > 1 ? this.numTokens / seconds : null;
    this.show({ tokens: this.numTokens, passes, speed: this.speed });
  }

  show({ tokens, passes, speed }, about = "") {
    this.part(".tokens").textContent = tokens;
    this.part(".passes").textContent = about + passes;
    this.part(".per-forward").textContent = passes ? about + (tokens / passes).toFixed(2) : "–";
    this.part(".speed").textContent = speed === null ? "–" : speed.toFixed(speed < 10 ? 1 : 0);
  }

  set state(text) {
    this.part(".state").textContent = text;
  }

  /** Show the passes again, slowly; an abort jumps to the end. */
  async replay(signal) {
    this.clear();
    for (const step of this.steps) {
      this.draw(step);
      if (!signal.aborted) await pause(REPLAY_PAUSE_MS);
    }
    this.finish();
  }
}

function drawToken(text, odds) {
  const token = document.createElement("span");
  token.className = "token";
  token.textContent = text;
  if (odds !== undefined) {
    token.style.setProperty("--p", odds.toFixed(3));
    token.title = `${(100 * odds).toFixed(1)} %`;
  }
  return token;
}

// A line end would make the block jump, and a token without text of its own could not be seen.
function drawOpen({ text, odds }, isFresh) {
  const token = drawToken(text.replaceAll("\n", "⏎") || "·", odds);
  token.classList.toggle("fresh", isFresh);
  return token;
}

function drawMask() {
  const mask = document.createElement("i");
  mask.className = "mask";
  mask.ariaHidden = "true";
  return mask;
}

/** JSON as a person reads it; anything else as it is. */
function asArguments(written) {
  try {
    const named = Object.entries(JSON.parse(written));
    return `(${named.map(([name, value]) => `${name}: ${JSON.stringify(value)}`).join(", ")})`;
  } catch {
    return ` ${written}`;
  }
}

function asSentence(message) {
  const text = message.trim();
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.?]$/.test(text) ? "" : ".");
}

function pause(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}
