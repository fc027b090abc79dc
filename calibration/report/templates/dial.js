"use strict";
(() => {
  const root = document.getElementById("dial");
  const data = JSON.parse(root.dataset.dial);
  const input = document.getElementById("passages");
  const output = document.getElementById("at");
  const signs = {
    relevant: ["✓", "relevant"], misleading: ["✗", "misleading"], other: ["·", ""],
  };
  const titles = { gains: "Gains", typical: "Typical", loses: "Loses" };
  const make = (tag, name, text, ...children) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text) made.textContent = text;
    made.append(...children);
    return made;
  };
  const figure = (value, digits) => value === null ? "no data" : value.toLocaleString(
    "en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const percent = (value) => value === null ? "no data" : `${Math.round(100 * value)}%`;
  const tiles = [
    ["of the relevant passages", "recall", percent, 1],
    ["misleading passages a question", "misleading",
      (value) => figure(value, 2), -1],
    ["passages a question", "kept", (value) => figure(value, 1), 0],
    ["tokens a question", "tokens", (value) => figure(value, 0), 0],
  ].filter(([, key]) => data.stops.some((stop) => stop[key] !== null));

  const rings = root.querySelectorAll(".stop");

  const side = (title, places, question, state) => {
    const list = make("ol");
    for (const place of places) {
      const [label, snippet, mark] = question.passages[place], [symbol, word] = signs[mark];
      const how = state(place), row = make("li", `${mark} ${how}`);
      const sign = make("span", "sign", symbol);
      sign.setAttribute("aria-hidden", "true");
      const name = make(how === "dropped" ? "s" : "span", "name", label);
      name.title = snippet;
      const said = make("span", "said", [word, how].filter(Boolean).join(", "));
      row.append(sign, name, said);
      list.append(row);
    }
    if (!places.length) list.append(make("li", "other", "nothing"));
    return make("div", "side", "", make("h5", "", title), list);
  };

  const show = () => {
    const at = Number(input.value), stop = data.stops[at], today = data.stops[data.today];
    const names = stop.names.length ? `: ${stop.names.join(", ")}` : "";
    output.textContent = `${figure(stop.kept, 1)} passages${names}`;
    input.setAttribute("aria-valuetext", output.textContent);
    root.querySelector(".tiles").replaceChildren(...tiles.map(([name, key, words, better]) => {
      const change = Math.sign(Number((stop[key] - today[key]).toFixed(3))) * better;
      const tone = change > 0 ? "better" : change < 0 ? "worse" : "";
      return make("div", "tile", "", make("strong", tone, words(stop[key])),
        make("span", "", name), make("span", "soft", `today ${words(today[key])}`));
    }));
    rings.forEach((ring, place) => ring.classList.toggle("here", place === at));
    root.querySelector(".questions").replaceChildren(...data.questions.map((question, number) => {
      const before = today.contexts[number], after = stop.contexts[number];
      return make("article", "", "",
        make("h4", "", "", make("span", "soft", titles[question.which]), question.text),
        make("div", "sides", "",
          side(`Today: ${before.length}`, before, question,
            (place) => after.includes(place) ? "" : "dropped"),
          side(`At this stop: ${after.length}`, after, question,
            (place) => before.includes(place) ? "" : "new")));
    }));
  };

  const last = data.stops.length - 1, line = root.querySelector(".stops");
  const names = data.stops.map((stop, place) => {
    const mark = make("span", place === data.today ? "orange" : "blue", stop.names.join(", "));
    mark.style.setProperty("--at", last ? place / last : 0);
    return mark;
  }).filter((mark) => mark.textContent);
  line.append(...names);
  // A name that would touch one on its row goes a row down.
  const arrange = () => {
    const ends = [];
    for (const name of names) {
      name.style.setProperty("--row", 0);
      const { left, right } = name.getBoundingClientRect();
      let row = ends.findIndex((end) => end + 8 < left);
      if (row < 0) row = ends.length;
      ends[row] = right;
      name.style.setProperty("--row", row);
    }
    line.style.setProperty("--rows", ends.length);
  };
  input.value = data.start;
  input.addEventListener("input", show);
  show();
  root.querySelectorAll("[hidden]").forEach((part) => { part.hidden = false; });
  arrange();
  addEventListener("resize", arrange);
})();
