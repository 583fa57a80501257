// The images of the next question, which a person chooses, pastes or drops on the page.

const $ = (id) => document.getElementById(id);
const chooser = $("image-files");
let maxBytes = 0; // of a file; 0 as long as the model is not known to read images
let images = []; // { name, url }: a data: URL, as the API takes it
let reading = Promise.resolve();

// What the server says of images: /live_state.
export function setImageLimits(live) {
  maxBytes = live.has_image_understanding ? live.max_image_bytes : 0;
  $("add-images").hidden = !maxBytes;
}

export function startImages() {
  $("add-images").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", () => {
    add([...chooser.files]);
    chooser.value = ""; // so that the same file can be chosen again
    $("text").focus();
  });
  document.addEventListener("paste", (event) => {
    const { files, types } = event.clipboardData;
    const isText = types.includes("text/plain") && types.includes("text/html"); // cells of a table, with a picture of them
    if (!maxBytes || !files.length || isText) return;
    event.preventDefault();
    add([...files]);
  });
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      if (!maxBytes || !event.dataTransfer.types.includes("Files")) return;
      event.preventDefault(); // the browser would open the file in place of the page
      $("composer").classList.toggle("dropping", kind === "dragover");
      if (kind === "drop") add([...event.dataTransfer.files]);
    });
  }
}

// Resolves when the files that have been added are read.
export function allRead() {
  return reading;
}

export function hasImages() {
  return images.length > 0;
}

// The URLs of the images, which are the next question's no longer.
export function takeImages() {
  const urls = images.map(({ url }) => url);
  images = [];
  tell("");
  draw();
  return urls;
}

export function offerImages(more) {
  images.push(...more);
  draw();
}

export function picture(url, name) {
  const shown = new Image();
  shown.src = url;
  shown.alt = name;
  return shown;
}

function add(chosen) {
  const kinds = chooser.accept.split(",");
  const refused = chosen.flatMap(({ name, type, size }) => {
    if (!kinds.includes(type)) return `${name} is not a PNG, JPEG, WebP or GIF image.`;
    return size > maxBytes ? `${name} has more than the ${maxBytes >> 20} MiB that the server takes.` : [];
  });
  tell(refused.join(" "));
  const taken = chosen.filter(({ type, size }) => kinds.includes(type) && size <= maxBytes);
  reading = reading.then(async () => {
    const urls = await Promise.all(taken.map(read));
    offerImages(taken.map(({ name }, index) => ({ name, url: urls[index] })).filter(({ url }) => url));
  });
}

// The file as a data: URL.
function read(file) {
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => resolve(tell(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

function tell(text) {
  $("images-note").textContent = text;
  $("images-note").hidden = !text;
}

function draw() {
  const items = images.map((image, index) => {
    const name = [`image ${index + 1}`, image.name].filter(Boolean).join(", ");
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Remove ${name}`);
    remove.addEventListener("click", () => {
      images.splice(index, 1);
      draw();
      ($("images").querySelectorAll("button")[index] ?? $("text")).focus();
    });
    const item = document.createElement("li");
    item.append(picture(image.url, name), remove);
    return item;
  });
  $("images").replaceChildren(...items);
  $("images-count").textContent = items.length ? `Images to send: ${items.length}` : "";
}
