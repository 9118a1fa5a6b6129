// Reloads the live part of the page every two seconds. The server escapes its text, and the page's
// Content-Security-Policy allows no other script than this file.
"use strict";
const live = document.getElementById("live");
const state = document.getElementById("state");
let updates = 0;

async function update() {
  try {
    const answer = await fetch("/live", { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    // Reuse the plot element if its source is unchanged, to avoid flicker.
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
