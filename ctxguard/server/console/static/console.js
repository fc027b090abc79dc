// Grading by keyboard. Every page works without this file: it sends the page's own forms, and puts
// the answer's part of the page in place of the present one.
"use strict";

let work = Promise.resolve();

const task = () => document.getElementById("task");
const cards = () => [...document.querySelectorAll("#task .card")];
const announce = (text) => { document.getElementById("announce").textContent = text; };

function current() {
  return document.activeElement.closest?.("#task .card") ?? document.querySelector("[data-current]");
}

// What this tab has graded, by whom and for what: the last grade can be undone first.
const steps = () => `ctxguard undo ${["annotator", "judge", "depth", "tenant"]
  .map((name) => document.getElementById("undo").elements[name].value).join("\n")}`;

function undoable() {
  try { return JSON.parse(sessionStorage.getItem(steps())) ?? []; } catch { return []; }
}

function remember(graded) {
  try { sessionStorage.setItem(steps(), JSON.stringify(graded.slice(-200))); } catch { /* no undo */ }
}

// Focus what is graded next, and let the undo button say whether there is something to undo.
function begin() {
  if (!task()) return;
  document.querySelector("#undo button").disabled = undoable().length === 0;
  const next = document.querySelector("[data-current]") ?? document.getElementById("next");
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

async function part(response, id) {
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  return page.getElementById(id);
}

async function show(response) {
  const found = response.ok ? await part(response.clone(), "task") : null;
  if (!found) {
    // Signed out, or an error: the whole page says so.
    document.documentElement.replaceWith(
      new DOMParser().parseFromString(await response.text(), "text/html").documentElement);
    document.querySelector("h1")?.scrollIntoView();
    return false;
  }
  task().replaceWith(found);
  history.replaceState(null, "", response.url);
  begin();
  announce(found.dataset.announce);
  return true;
}

// Send a form of the page; whether the answer is the page with the grade.
async function send(form, value) {
  const fields = new URLSearchParams(new FormData(form));
  fields.set("grade", value);
  try {
    return await show(await fetch(form.action, { method: "POST", body: fields }));
  } catch {
    const problem = document.createElement("p");
    problem.className = "problem";
    problem.setAttribute("role", "alert");
    problem.textContent = "The server did not answer: the grade was not stored.";
    (form.closest(".card") ?? form).append(problem);
    return false;
  }
}

async function grade(card, value) {
  const { passage, own } = card.dataset;
  const form = card.querySelector("form");
  const isOffered = [...form.elements.grade].some((button) => button.value === value);
  const sample = form.elements.sample.value;
  if (isOffered && own !== value && await send(form, value)) {
    remember([...undoable(), { sample, passage, grade: own }]);
    begin();
  }
}

async function undo() {
  const graded = undoable();
  const last = graded.pop();
  if (!last) return announce("There is nothing to undo.");
  const form = document.getElementById("undo");
  form.elements.sample.value = last.sample;
  form.elements.passage.value = last.passage;
  if (await send(form, last.grade)) {
    remember(graded);
    begin();
  }
}

function move(step) {
  const all = cards();
  const here = all.indexOf(current());
  const to = all[Math.min(Math.max(here + step, 0), all.length - 1)];
  to?.focus();
}

// One after the other: the second of two quick keys is about the passage that the first leads to.
function then(act) { work = work.then(act); }

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (!task()?.contains(form)) return;
  event.preventDefault();
  const card = form.closest(".card");
  then(() => (card ? grade(card, event.submitter.value) : undo()));
});

document.addEventListener("keydown", (event) => {
  const isHere = event.target === document.body || task()?.contains(event.target);
  if (!task() || !isHere || event.altKey) return;
  const key = event.key.toLowerCase();
  const isCommand = event.ctrlKey || event.metaKey;
  if (isCommand ? key === "z" : key === "u") then(undo);
  else if (isCommand) return;
  else if (key === "arrowdown") move(1);
  else if (key === "arrowup") move(-1);
  else if (key === "n") document.getElementById("next").click();
  else if (/^[0-9dh]$/.test(key)) then(() => { const card = current(); if (card) return grade(card, key); });
  else return;
  event.preventDefault();
});

document.addEventListener("toggle", async (event) => {
  const { load, part: id } = event.target.dataset ?? {};
  if (!load || !event.target.open || event.target.dataset.loaded) return;
  event.target.dataset.loaded = "yes";
  const panel = event.target.querySelector(".panel");
  panel.textContent = "Reading the store…";
  try {
    const found = await part(await fetch(load), id);
    panel.replaceChildren(...(found ? found.childNodes : ["This could not be read."]));
  } catch {
    panel.textContent = "The server did not answer.";
  }
}, true);

begin();
