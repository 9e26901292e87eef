// The canvas that visitors draw on, with a mouse, a pen or a finger.

const find = (id) => document.getElementById(id);

export class Sheet {
  // `settings` are those of drawing.py.
  constructor(settings) {
    this.settings = settings;
    this.lines = [];
    this.canvas = document.querySelector("#sheet canvas");
    this.canvas.width = settings.width;
    this.canvas.height = settings.height;
    this.pen = this.canvas.getContext("2d");
    this.#lay();
    this.canvas.addEventListener("pointerdown", (event) => this.#begin(event));
    this.canvas.addEventListener("pointermove", (event) => this.#go(event));
    for (const end of ["pointerup", "pointercancel"]) this.canvas.addEventListener(end, () => this.#end());
    find("undo").addEventListener("click", () => {
      this.lines.pop();
      this.#show();
    });
    find("wipe").addEventListener("click", () => this.wipe());
    this.#show();
  }

  get empty() {
    return this.lines.length === 0;
  }

  wipe() {
    this.lines = [];
    this.#show();
  }

  toDataURL() {
    return this.canvas.toDataURL("image/png");
  }

  #lay() {
    const { width, height, ink, paper, reads, patches } = this.settings;
    const sheet = find("sheet");
    sheet.style.setProperty("--ratio", width / height);
    sheet.style.background = paper;
    find("hint").style.color = ink;
    find("reads").textContent = `Read as ${reads[1]} × ${reads[0]} pixels`;
    if (!patches) return;
    const [rows, columns] = patches;
    find("reads").textContent += `, ${rows} × ${columns} patches`;
    const guides = find("guides");
    const line = `color-mix(in srgb, ${ink} 22%, transparent)`;
    guides.style.backgroundImage = `linear-gradient(to right, ${line} 1px, transparent 1px), linear-gradient(to bottom, ${line} 1px, transparent 1px)`;
    guides.style.backgroundSize = `calc(100% / ${columns}) calc(100% / ${rows})`;
    guides.style.backgroundPosition = "-1px -1px";
  }

  #place(event) {
    const box = this.canvas.getBoundingClientRect();
    const scale = this.canvas.width / box.width;
    return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  }

  #begin(event) {
    if (event.button !== 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.line = [this.#place(event)];
    this.lines.push(this.line);
    this.#show();
  }

  #go(event) {
    if (!this.line) return;
    const events = event.getCoalescedEvents?.() ?? [];
    for (const each of events.length ? events : [event]) this.line.push(this.#place(each));
    this.#show();
  }

  #end() {
    this.line = null;
  }

  #show() {
    const { pen, settings } = this;
    pen.fillStyle = settings.paper;
    pen.fillRect(0, 0, settings.width, settings.height);
    pen.strokeStyle = settings.ink;
    pen.lineWidth = settings.pen;
    pen.lineCap = pen.lineJoin = "round";
    for (const line of this.lines) {
      pen.beginPath();
      pen.moveTo(...line[0]);
      // Curves through the middles between points: a mouse gives few points, which straight lines would show.
      for (let index = 1; index < line.length - 1; index++) {
        const [[x, y], [nextX, nextY]] = [line[index], line[index + 1]];
        pen.quadraticCurveTo(x, y, (x + nextX) / 2, (y + nextY) / 2);
      }
      pen.lineTo(...line.at(-1));
      pen.stroke();
    }
    find("hint").hidden = !this.empty;
    for (const name of ["undo", "wipe", "another"]) find(name).disabled = this.empty;
  }
}
