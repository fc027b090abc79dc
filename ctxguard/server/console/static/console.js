// Grading by keyboard. Every page works without this file: it sends the page's own forms, and puts
// the answer's part of the page in place of the present one.
"use strict";

// One act after the other: the second of two quick keys is about the passage that the first leads
// to. The script runs before the page is there, so that keys pressed while it loads wait too.
let work = new Promise((ready) => document.addEventListener("DOMContentLoaded", ready));
const then = (act) => { work = work.then(act); };

const task = () => document.getElementById("task");
const cards = () => [...document.querySelectorAll("#task .card")];
const announce = (text) => { document.getElementById("announce").textContent = text; };

function current() {
  return document.activeElement.closest?.("#task .card") ?? document.querySelector("[data-current]");
}

// The grades that this tab gave, by person and task: the last one is undone first.
const steps = () => `ctxguard undo ${["annotator", "judge", "tenant"]
  .map((name) => document.getElementById("undo").elements[name]?.value ?? "").join("\n")}`;

function undoable() {
  try { return JSON.parse(sessionStorage.getItem(steps())) ?? []; } catch { return []; }
}

function remember(graded) {
  try { sessionStorage.setItem(steps(), JSON.stringify(graded.slice(-200))); } catch { /* no undo */ }
}

// Focus the passage that is graded next, and let the undo button say whether it can undo anything.
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
    // Nothing is left to grade, signed out, or an error: the whole page says so.
    document.documentElement.replaceWith(
      new DOMParser().parseFromString(await response.text(), "text/html").documentElement);
    history.replaceState(null, "", response.url);
    document.querySelector("h1")?.scrollIntoView();
    return false;
  }
  task().replaceWith(found);
  history.replaceState(null, "", response.url);
  begin();
  announce(found.dataset.announce);
  return true;
}

// Fetch and show; whether the answer is the page with the passages.
async function load(address, near, problem, request) {
  try {
    return await show(await fetch(address, request));
  } catch {
    const told = document.createElement("p");
    told.className = "problem";
    told.setAttribute("role", "alert");
    told.textContent = `The server did not answer: ${problem}.`;
    near.append(told);
    return false;
  }
}

function send(form, value) {
  const body = new URLSearchParams(new FormData(form));
  body.set("grade", value);
  return load(form.action, form.closest("[data-passage]") ?? form, "the grade was not stored", { method: "POST", body });
}

async function grade(card, value) {
  if (!card) return;
  const { passage, own } = card.dataset;
  const form = card.querySelector("form");
  const isOffered = [...form.querySelectorAll("[name=grade]")].some((button) => button.value === value);
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

async function next() {
  const link = document.getElementById("next");
  if (await load(link.href, link.parentElement, "press n again")) {
    window.scrollTo(0, 0);
    begin();
  }
}

function move(step) {
  const all = cards();
  const here = all.indexOf(current());
  all[Math.min(Math.max(here + step, 0), all.length - 1)]?.focus();
}

const KEYS = { u: undo, n: next, arrowdown: () => move(1), arrowup: () => move(-1),
  x: () => grade(document.getElementById("whole"), "x") };

document.addEventListener("DOMContentLoaded", begin);

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (!task()?.contains(form)) return;
  event.preventDefault();
  const card = form.closest("[data-passage]");
  then(() => (card ? grade(card, event.submitter.value) : undo()));
});

document.addEventListener("click", (event) => {
  if (event.target.closest?.("#next") && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
    event.preventDefault();
    then(next);
  }
});

document.addEventListener("keydown", (event) => {
  const isHere = event.target === document.body || task()?.contains(event.target);
  if (!isHere || event.altKey || !(task() || document.readyState === "loading")) return;
  const key = event.key.toLowerCase();
  const isUndo = (event.ctrlKey || event.metaKey) && key === "z";
  const act = isUndo ? undo
    : event.ctrlKey || event.metaKey ? null
    : /^[0-9dh]$/.test(key) ? () => grade(current(), key)
    : KEYS[key];
  if (!act) return;
  event.preventDefault();
  then(() => task() && act());
});
