// The page: its two views, and who asks the server what.

import { startChat } from "/web/chat.js";
import { startServerView } from "/web/server.js";

const views = document.querySelectorAll("nav button");

for (const button of views) {
  button.addEventListener("click", () => {
    document.body.dataset.pane = button.dataset.pane;
    for (const each of views) each.setAttribute("aria-pressed", String(each === button));
    document.dispatchEvent(new Event("visibilitychange")); // the server's view may be in sight now
  });
}

const serverView = startServerView();
startChat({ onChange: () => serverView.look() });
