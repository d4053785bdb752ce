// Asks the server again and again while a view is shown and its tab is visible.

export class Poller {
  // update(signal): asks once; what it throws on an abort is dropped; false: not again until `restart`.
  constructor(update, againMs, isWanted = () => true) {
    Object.assign(this, { update, againMs, isWanted, isShown: false, timer: null, stopper: null });
    document.addEventListener("visibilitychange", () => this.restart());
  }

  show() {
    this.isShown = true;
    this.restart();
  }

  hide() {
    this.isShown = false;
    this.restart();
  }

  restart() {
    clearTimeout(this.timer);
    this.stopper?.abort();
    this.stopper = null;
    if (this.isShown && !document.hidden && this.isWanted()) this.ask();
  }

  async ask() {
    const stopper = this.stopper = new AbortController();
    let goesOn;
    try {
      goesOn = await this.update(stopper.signal);
    } catch (problem) {
      if (problem.name === "AbortError") return;
      throw problem;
    }
    if (goesOn !== false && this.stopper === stopper) this.timer = setTimeout(() => this.ask(), this.againMs);
  }
}
