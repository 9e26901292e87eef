// The page: sends questions and pictures to the server, and shows answers and where the model looked.

import { Sheet } from "./sheet.js";
import { call, stream } from "./server.js";

const find = (id) => document.getElementById(id);
const settings = JSON.parse(document.body.dataset.settings);
const [talk, notice, text, send, tray] = ["talk", "notice", "text", "send", "tray"].map(find);
const sheet = settings.drawing && new Sheet(settings.drawing);

let visitor = null; // the name that the server gave this page
let waiting = []; // small pictures of the next message
let answering = false;

function make(tag, options = {}, ...children) {
  const { dataset, ...rest } = options;
  const element = Object.assign(document.createElement(tag), rest);
  Object.assign(element.dataset, dataset);
  element.append(...children);
  return element;
}

function tell(message) {
  notice.hidden = !message;
  notice.textContent = message ?? "";
}

function update() {
  send.classList.toggle("stops", answering);
  send.title = answering ? "Stop" : "Ask";
  send.setAttribute("aria-label", send.title);
  for (const button of find("questions").children) button.disabled = answering;
  tray.replaceChildren(
    ...waiting.map((source, index) => {
      const remove = make("button", { type: "button", textContent: "✕", ariaLabel: `Remove picture ${index + 1}` });
      remove.addEventListener("click", () => attempt(async () => showWaiting(await call("remove_picture", await me(), index))));
      return make("span", {}, make("img", { src: source, alt: `Picture ${index + 1}` }), remove);
    }),
  );
  find("clear").hidden = !talk.querySelector(".question") && !waiting.length;
}

function showWaiting(pictures) {
  waiting = pictures;
  update();
}

// Runs an action, and tells the visitor if it fails. Returns whether it was done.
async function attempt(action) {
  tell(null);
  try {
    await action();
    return true;
  } catch (error) {
    tell(error.message);
    return false;
  }
}

let arrival = null;
function me() {
  arrival ??= call("visit").catch((error) => {
    arrival = null;
    throw error;
  });
  return arrival;
}

// --- pictures

async function addPicture(source, name) {
  showWaiting(await call("add_picture", await me(), source, name));
}

async function addFiles(files) {
  for (const file of files) {
    const added = await attempt(async () => {
      if (file.size > settings.maxBytes) throw new Error(`${file.name} is too large.`);
      await addPicture(await read(file), file.name || "The picture");
    });
    if (!added) return;
  }
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

async function addDrawing() {
  if (!sheet || sheet.empty) return;
  await addPicture(sheet.toDataURL(), "The drawing");
  sheet.wipe();
}

// --- questions and answers

async function ask(question) {
  if (answering) return;
  question = question.trim();
  if (!question) return tell("Write a question first.");
  answering = true;
  update();
  let asked, answer;
  await attempt(async () => {
    await addDrawing();
    asked = showQuestion(question, waiting);
    if (find("pad").offsetHeight > innerHeight / 4 && matchMedia("(max-width: 60rem)").matches) showPad(false); // room to read
    answer = make("p", { className: "answer waiting" });
    talk.append(answer);
    toEnd();
    text.value = "";
    grow();
    waiting = [];
    update();
    try {
      await stream("ask", [await me(), question], (state) => {
        const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80;
        answer.textContent = state.text;
        if (state.done) showWords(answer, state);
        if (atEnd) toEnd();
      });
      answer.classList.remove("waiting");
    } catch (error) {
      asked.remove();
      answer.remove();
      text.value ||= question;
      grow();
      waiting = asked.pictures; // they wait again, on the server too
      throw error;
    }
  });
  answering = false;
  update();
}

function showQuestion(question, pictures) {
  find("welcome")?.remove();
  const message = make("div", { className: "question" });
  message.pictures = pictures;
  if (pictures.length) {
    message.append(make("div", { className: "pictures" }, ...pictures.map((source, index) => make("img", { src: source, alt: `Picture ${index + 1}` }))));
  }
  message.append(make("p", { textContent: question }));
  talk.append(message);
  return message;
}

function showWords(answer, state) {
  answer.classList.remove("waiting");
  if (!state.text.trim()) {
    answer.textContent = "(an empty answer)";
    return;
  }
  if (!state.looks) return;
  const letters = [...state.text]; // the server counts characters, JavaScript counts UTF-16 units
  const parts = [];
  let end = 0;
  state.words.forEach(([start, length], index) => {
    parts.push(letters.slice(end, start).join(""));
    const word = letters.slice(start, start + length).join("");
    const button = make("button", { type: "button", className: "word", textContent: word, ariaPressed: "false" });
    button.addEventListener("click", () => look(answer, button, state.answer, index));
    parts.push(button);
    end = start + length;
  });
  answer.replaceChildren(...parts, letters.slice(end).join(""));
  document.querySelector(".tip")?.remove();
  if (!document.querySelector("figure")) answer.after(make("p", { className: "tip", textContent: "Choose a word to see where the model looked." }));
}

// --- where the model looked

async function look(answer, button, number, word, layer = null) {
  document.querySelector(".tip")?.remove();
  const chosen = button.ariaPressed === "true" && layer === null;
  for (const other of answer.children) other.ariaPressed = "false";
  let figure = answer.nextElementSibling?.matches("figure") ? answer.nextElementSibling : null;
  if (chosen) return figure?.remove(); // the same word again
  button.ariaPressed = "true";
  if (!figure) {
    figure = make("figure", { textContent: "Looking …" });
    answer.after(figure);
  }
  figure.classList.add("loading");
  const request = (figure.request = Symbol("look")); // of several requests, only the last is shown
  const done = await attempt(async () => {
    // A layer that was chosen stays chosen for the other words of the answer.
    if (layer !== null) figure.layer = layer === "mean" ? null : Number(layer);
    const state = await stream("look", [await me(), number, word, figure.layer ?? null]);
    if (figure.request !== request) return;
    const select = make("select", { ariaLabel: "Layer" }, new Option("mean of layers", "mean"));
    for (const each of state.layers) select.append(new Option(`layer ${each}`, each));
    select.value = figure.layer ?? "mean";
    select.addEventListener("change", () => look(answer, button, number, word, select.value));
    figure.replaceChildren(
      make("div", { className: "pictures" }, ...state.pictures.map((each) => seen(each, state.pictures.length > 1))),
      make("figcaption", {}, make("span", {}, "Where the model looked for ", make("b", { textContent: button.textContent })), select),
    );
    figure.classList.remove("loading");
    figure.scrollIntoView({ block: "nearest", behavior: "smooth" });
  });
  if (!done && figure.request === request) {
    figure.remove();
    button.ariaPressed = "false";
  }
}

function seen({ picture, heat, width, height, covered, share }, several) {
  // Several pictures stand side by side, wide ones one above the other in narrow windows.
  const half = width > 2 * height ? 255 : Math.min(255, Math.max(120, (talk.clientWidth - 90) / 2));
  const scale = Math.min((several ? half : 480) / width, (several ? 180 : 260) / height);
  const frame = make("div");
  frame.style.width = `${width * scale}px`;
  frame.style.aspectRatio = `${width} / ${height}`;
  const over = make("img", { className: "heat", src: heat, alt: "" });
  over.style.height = `${covered[0] * 100}%`;
  over.style.width = `${covered[1] * 100}%`;
  frame.append(make("img", { src: picture, className: width < 200 ? "small" : "", alt: "The picture as the model reads it" }), over);
  const item = make("div", { className: "seen" }, frame);
  if (several) item.append(`${Math.round(share * 100)} % of the attention`);
  return item;
}

// --- the controls

function toEnd() {
  talk.scrollTop = talk.scrollHeight;
}

function grow() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight}px`;
}

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (answering) attempt(async () => call("stop", await me()));
  else ask(text.value);
});
text.addEventListener("input", grow);
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!answering) ask(text.value);
});

find("clear").addEventListener("click", () =>
  attempt(async () => {
    await call("clear", await me());
    location.reload();
  }),
);

for (const question of settings.questions) {
  const button = make("button", { type: "button", textContent: question });
  button.addEventListener("click", () => ask(question));
  find("questions").append(button);
}

function showPad(shown) {
  find("pad").hidden = !shown;
  find("draw").ariaPressed = String(shown);
  document.body.classList.toggle("drawing", shown);
}

if (sheet) {
  find("choose").hidden = find("draw").hidden = false;
  showPad(true);
  find("draw").addEventListener("click", () => showPad(find("pad").hidden));
  find("another").addEventListener("click", () => attempt(addDrawing));
  find("choose").addEventListener("click", () => find("files").click());
  find("files").addEventListener("change", async (event) => {
    await addFiles([...event.target.files]);
    event.target.value = "";
  });
  let depth = 0; // of the elements that a dragged file has entered
  const dropping = (change) => {
    depth = change ? Math.max(0, depth + change) : 0;
    document.body.classList.toggle("dropping", depth > 0);
  };
  addEventListener("dragenter", () => dropping(1));
  addEventListener("dragleave", () => dropping(-1));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    dropping(0);
    addFiles([...event.dataTransfer.files]);
  });
  addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) addFiles([...event.clipboardData.files]);
  });
} else {
  const welcome = find("welcome");
  welcome.querySelector("h2").textContent = "Ask a question";
  welcome.querySelector("p").remove();
}
update();
