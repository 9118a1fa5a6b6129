// Takes the page's live part again every two seconds. It comes escaped from this server, and the page's
// Content-Security-Policy runs no script but this file.
"use strict";
const live = document.getElementById("live");
const state = document.getElementById("state");
let updates = 0;

async function update() {
  try {
    const answer = await fetch("/live", { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    // A plot of the same records stays: it would flicker.
    const shown = document.getElementById("plot"), next = fresh.getElementById("plot");
    if (shown && next && shown.getAttribute("src") === next.getAttribute("src")) next.replaceWith(shown);
    live.replaceChildren(...fresh.body.childNodes);
    updates += 1;
    state.textContent = `live, ${updates} ${updates === 1 ? "update" : "updates"}`;
  } catch (problem) {
    state.textContent = `not live: ${problem.message}`;
  }
  setTimeout(update, 2000);
}

update();
