// The page around the answers: settings, the conversation, keys and errors.

import { AnswerView, Fault, callApi, streamAnswer } from "./answer.js";

const POLL_MS = 1500;
const MODE_HINTS = {
  diffusion: "Denoises block by block: the fastest, with answers of its own.",
  verified: "Drafts by diffusion and keeps what the AR path agrees with: its answer, in fewer passes.",
  ar: "One token a pass: what the others are measured against.",
};

const at = (id) => document.getElementById(id);
let messages = []; // the conversation as the API gets it; another array for another conversation
let model = null; // {name, diffusion}
let openCalls = []; // calls of the last answer whose results are to be typed
let key = ""; // in memory only
let running = null; // the AbortController of what runs

// ---- Where the model is

async function findModel() {
  try {
    const [card] = (await (await callApi("v1/models", { key })).json()).data;
    if (!card) return later("the model is loading …");
    const facts = await (await callApi("v1/provenance", { key })).json();
    show(card, facts);
    tell("");
    at("key-row").hidden = true;
  } catch (error) {
    report(error, tell);
    if (error.status === 401) {
      at("model-name").textContent = "locked";
      askForKey();
    } else {
      later("not reachable");
    }
  }
}

function later(text) {
  at("model-name").textContent = text;
  setTimeout(findModel, POLL_MS);
}

function show(card, { tensor_root: root, diffusion }) {
  model = { name: card.id, diffusion };
  at("model-name").textContent = card.id;
  at("model-root").textContent = root.slice(0, 12);
  at("model-root").title = `tensor root ${root}`;
  at("model-root").hidden = false;
  at("max-tokens").max = Math.max(8, Math.min(2048, Math.floor(card.max_model_len / 8) * 8));
  for (const option of at("mode").options) option.disabled = !diffusion && option.value !== "ar";
  if (diffusion) showBlockSizes(diffusion);
  else at("mode").value = "ar";
  updateSettings();
}

function showBlockSizes({ block_size: own, trained_block_sizes: sizes }) {
  const options = sizes.map((size) => new Option(size, size, size === own, size === own));
  at("block").replaceChildren(...options);
  at("block-row").hidden = sizes.length < 2;
}

function askForKey() {
  at("key-row").hidden = false;
  at("key").focus();
}

function useKey() {
  const given = at("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(given)) return tell("An API key is made of plain letters, digits and signs.");
  key = given;
  at("key").value = "";
  findModel();
  at("prompt").focus();
}

// ---- Settings

function updateSettings() {
  const mode = at("mode").value;
  at("mode-hint").textContent = model && !model.diffusion ? "This model is not converted to diffusion." : MODE_HINTS[mode];
  at("denoising").disabled = mode === "ar";
  at("compare").disabled = mode === "ar";
  if (model?.diffusion) at("steps").max = at("block").value;
  const steps = at("steps").value;
  at("steps-value").textContent = steps === "0" ? "auto" : steps;
  for (const id of ["max-tokens", "parameter", "temperature"]) at(`${id}-value`).textContent = at(id).value;
}

function updatePolicy() {
  const { name, min, max, step, default: value } = at("policy").selectedOptions[0].dataset;
  at("parameter-row").hidden = !name;
  if (name) {
    at("parameter-name").textContent = name;
    Object.assign(at("parameter"), { min, max, step, value });
  }
  updateSettings();
}

function settings(mode, seed) {
  const asked = {
    model: model.name,
    messages,
    max_tokens: Number(at("max-tokens").value),
    temperature: Number(at("temperature").value),
    seed,
    stream: true,
    stream_options: { include_usage: true },
    diffusion: { mode, trace: true },
  };
  const tools = readTools();
  if (tools.length) asked.tools = tools;
  const thinking = at("thinking").value;
  if (thinking) asked.chat_template_kwargs = { enable_thinking: thinking === "on" };
  if (mode === "ar") return asked;
  const steps = Number(at("steps").value);
  if (steps) asked.diffusion.denoising_steps = steps;
  asked.diffusion.block_size = Number(at("block").value);
  asked.diffusion.policy = at("policy").value;
  if (!at("parameter-row").hidden) asked.diffusion.policy_parameter = Number(at("parameter").value);
  return asked;
}

/** The tools that are typed in. Throws a Fault where they are no JSON array. */
function readTools() {
  const written = at("tools").value.trim();
  if (!written) return [];
  try {
    const tools = JSON.parse(written);
    if (Array.isArray(tools)) return tools;
  } catch {
    // told below
  }
  throw new Fault("Tools must be a JSON array. Correct it in the settings, or empty it.");
}

// ---- The conversation

async function send() {
  const text = at("prompt").value.toWellFormed?.() ?? at("prompt").value;
  if (running || !text.trim()) return;
  if (!model) return tell("There is no model to ask yet.");
  try {
    readTools();
  } catch (error) {
    return report(error, tell);
  }
  at("prompt").value = "";
  tell("");
  const turn = openTurn(text);
  const call = openCalls.shift();
  const said = call ? { role: "tool", tool_call_id: call.id, content: text } : { role: "user", content: text };
  if (call) turn.classList.add("result");
  askForResult();
  if (openCalls.length) return messages.push(said);
  const mode = at("mode").value;
  const modes = mode !== "ar" && at("compare").checked ? [mode, "ar"] : [mode];
  const views = modes.map((name) => openAnswer(turn, name));
  const conversation = messages;
  conversation.push(said);
  const seed = crypto.getRandomValues(new Uint32Array(1))[0];
  const asked = modes.map((name) => structuredClone(settings(name, seed)));
  await whileRunning((signal) => answerAll(turn, views, asked, signal));
  if (conversation === messages) close(views[0], text, call);
}

/** One after the other, so that none slows the other. */
async function answerAll(turn, views, asked, signal) {
  for (const [idx, view] of views.entries()) {
    if (signal.aborted) break;
    if (!(await answer(view, asked[idx], signal, (message) => fault(turn, message)))) break;
    say(`${view.name}: ${view.content}${view.calls.map((call) => ` calls ${call.function.name}`).join("")}`);
  }
  for (const view of views.filter((view) => view.root.classList.contains("waits"))) view.state = "not asked";
  if (views.length === 2 && views.every((view) => view.cost)) compare(turn, ...views);
}

async function answer(view, asked, signal, onFault) {
  view.root.classList.remove("waits");
  view.root.ariaBusy = "true";
  view.state = asked.diffusion.mode === "ar" ? "token by token …" : "denoising …";
  try {
    await streamAnswer(asked, view, { key, signal });
    view.state = { length: "ends at the token limit", tool_calls: "calls" }[view.cost.reason] ?? "";
    return true;
  } catch (error) {
    view.state = error.name === "AbortError" ? "stopped" : "failed";
    report(error, onFault);
    return false;
  } finally {
    view.finish();
    view.countExactly();
    view.root.ariaBusy = "false";
    view.part(".replay").hidden = view.steps.length === 0;
  }
}

/** What the conversation keeps of a turn: nothing of one that gave no text. */
function close(view, text, call) {
  const calls = view.cost?.reason === "tool_calls" ? view.calls : [];
  if (view.content || calls.length) {
    const message = { role: "assistant", content: view.content };
    if (view.reasoning) message.reasoning_content = view.reasoning;
    if (calls.length) message.tool_calls = calls;
    messages.push(message);
    openCalls = [...calls];
  } else {
    messages.pop();
    if (call) openCalls.unshift(call);
    if (!view.cost && !at("prompt").value) at("prompt").value = text;
  }
  askForResult();
}

/** Say in the empty field what is to be typed: a message, or what a call gives back. */
function askForResult() {
  const [call] = openCalls;
  at("prompt").placeholder = call ? `What ${call.function.name} gives back` : "Ask something";
}

async function whileRunning(work) {
  running = new AbortController();
  at("stop").disabled = false;
  at("send").disabled = true;
  try {
    await work(running.signal);
  } finally {
    running = null;
    at("stop").disabled = true;
    at("send").disabled = false;
  }
}

function stop() {
  running?.abort();
  at("prompt").focus();
}

function openTurn(text) {
  at("welcome").hidden = true;
  const turn = at("turn-template").content.cloneNode(true).firstElementChild;
  turn.querySelector(".prompt").textContent = text;
  at("log").append(turn);
  at("log").scrollTo({ top: at("log").scrollHeight });
  return turn;
}

function openAnswer(turn, name) {
  const root = at("answer-template").content.cloneNode(true).firstElementChild;
  root.ariaLabel = `${name} answer`;
  root.classList.add("waits");
  turn.querySelector(".answers").append(root);
  const view = new AnswerView(root, name);
  view.name = name;
  view.state = "waits for its turn";
  view.part(".replay").addEventListener("click", () => {
    if (!running) whileRunning((signal) => view.replay(signal));
  });
  followGrowth(root);
  return view;
}

// The end of the conversation stays in sight while it grows, unless one has scrolled away from it.
function followGrowth(root) {
  const log = at("log");
  let height = log.scrollHeight;
  new ResizeObserver(() => {
    const wasAtEnd = log.scrollTop + log.clientHeight > height - 80;
    height = log.scrollHeight;
    if (wasAtEnd && running) log.scrollTo({ top: height });
  }).observe(root);
}

function compare(turn, view, ar) {
  const verdict = turn.querySelector(".verdict");
  const written = ({ content, calls }) => JSON.stringify([content, calls.map((call) => call.function)]);
  const same = written(view) === written(ar) ? "same text as AR" : "another text than AR";
  const { num_forward_passes: count } = view.cost;
  const passes = `${count} ${count === 1 ? "pass" : "passes"} instead of ${ar.cost.num_forward_passes}`;
  const ratio = document.createElement("strong");
  if (view.speed && ar.speed) ratio.textContent = `${(view.speed / ar.speed).toFixed(2)} × the speed of AR`;
  verdict.append(ratio, ratio.textContent ? ` · ${passes} · ${same}` : `${passes} · ${same}`);
  verdict.hidden = false;
  at("log").scrollTo({ top: at("log").scrollHeight });
}

function newChat() {
  running?.abort();
  messages = [];
  openCalls = [];
  askForResult();
  at("log").replaceChildren(at("welcome"));
  at("welcome").hidden = false;
  tell("");
  at("prompt").focus();
}

// ---- What is said

function report(error, show) {
  if (error.name === "AbortError") return;
  if (!(error instanceof Fault)) console.error(error);
  show(error instanceof Fault ? error.message : "The page made a mistake. Reload it to go on.");
  if (error.status === 401) askForKey();
}

function fault(turn, message) {
  turn.querySelector(".fault").textContent = message;
  turn.querySelector(".fault").hidden = false;
}

function tell(message) {
  at("notice").textContent = message;
  at("notice").hidden = !message;
}

function say(text) {
  at("status").textContent = text;
}

// ---- Theme

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function storedTheme(change) {
  try {
    if (change) localStorage.setItem("theme", change);
    return localStorage.getItem("theme");
  } catch {
    return change ?? null; // storage is switched off: the choice lasts as long as the page
  }
}

function isDark() {
  return document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : prefersDark.matches;
}

function showTheme(theme) {
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  at("theme").ariaPressed = String(isDark());
}

// ---- Wiring

for (const token of document.querySelectorAll(".demo .token")) token.style.setProperty("--p", token.dataset.p);
at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) stop();
});
at("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  useKey();
});
at("use-key").addEventListener("click", useKey);
at("stop").addEventListener("click", stop);
at("new-chat").addEventListener("click", newChat);
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("settings").addEventListener("input", (event) => (event.target.id === "policy" ? updatePolicy() : updateSettings()));
at("show-settings").addEventListener("click", () => {
  at("show-settings").ariaExpanded = String(at("settings").classList.toggle("open"));
});
at("examples").addEventListener("click", (event) => {
  if (!event.target.matches("button")) return;
  at("prompt").value = event.target.textContent;
  at("prompt").focus();
});
at("theme").addEventListener("click", () => showTheme(storedTheme(isDark() ? "light" : "dark")));
prefersDark.addEventListener("change", () => showTheme());

showTheme(storedTheme());
updatePolicy();
findModel();
