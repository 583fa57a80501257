// Requests to the server: with its key where it asks for one, and answers that come as a stream of events.

const STORED = { api: "fenceline.key", admin: "fenceline.admin-key" };
const dialog = document.getElementById("key-dialog");
let asking = null; // the open question for a key: many requests may wait for one answer

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The answer to a request, which may still be a stream. Throws ApiError with the server's reason. `mayAsk`: whether
// a person may be asked for a key now.
export async function request(path, { admin = false, mayAsk = true, ...options } = {}) {
  for (;;) {
    const key = (admin && sessionStorage.getItem(STORED.admin)) || sessionStorage.getItem(STORED.api);
    const headers = { ...options.headers, ...(key ? { Authorization: "Bearer " + key } : {}) };
    const response = await fetch(path, { ...options, headers, cache: "no-store" });
    if (response.ok) return response;
    const message = await reasonOf(response);
    if (response.status !== 401 || !mayAsk) throw new ApiError(response.status, message);
    const kind = /admin/.test(message) ? "admin" : "api";
    // An admin key that is refused as an API key is none any more: without it the API key has its turn.
    if (kind === "api" && key === sessionStorage.getItem(STORED.admin)) sessionStorage.removeItem(STORED.admin);
    if (!(await askForKey(kind, key))) throw new ApiError(401, message);
  }
}

async function reasonOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

// Whether there is another key now than the refused one.
async function askForKey(kind, refused) {
  if (sessionStorage.getItem(STORED[kind]) !== refused && kind === "api" && sessionStorage.getItem(STORED.api)) return true;
  asking ??= showDialog(kind, refused).finally(() => (asking = null));
  return asking;
}

function showDialog(kind, refused) {
  const field = document.getElementById("key");
  const isAdmin = kind === "admin";
  document.getElementById("key-title").textContent = isAdmin ? "Admin API key" : "API key";
  document.getElementById("key-why").textContent =
    `This ${isAdmin ? "needs the server's admin key" : "server asks for a key"}. It is kept in this tab and sent only to ` +
    "this server.";
  document.getElementById("key-error").hidden = !refused || (isAdmin && !sessionStorage.getItem(STORED.admin));
  field.value = "";
  dialog.showModal();
  field.focus();
  return new Promise((resolve) => {
    document.getElementById("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(STORED[kind], field.value.trim());
      dialog.close("given");
    };
    document.getElementById("key-cancel").onclick = () => dialog.close("");
    dialog.onclose = () => {
      field.value = "";
      resolve(dialog.returnValue === "given");
      dialog.returnValue = "";
    };
  });
}

// The JSON objects of a stream of server-sent events, until [DONE]. Throws ApiError for an error in the stream.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.code, event.error.message);
      yield event;
    }
  }
}
