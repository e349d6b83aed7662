// Runs in the browser's audio thread: sends what the microphone hears to the page, in pieces.

const PIECE = 2048;  // samples

class Capture extends AudioWorkletProcessor {
  constructor() {
    super();
    this.clear();
    this.ended = false;
    this.port.onmessage = () => {  // the end
      this.ended = true;
      this.port.postMessage(this.piece.slice(0, this.filled));
      this.port.postMessage(null);
    };
  }

  clear() {
    this.piece = new Float32Array(PIECE);
    this.filled = 0;
  }

  process([[samples]]) {
    if (this.ended) return false;
    if (!samples) return true;  // nothing is connected yet
    if (this.filled + samples.length > PIECE) {
      this.port.postMessage(this.piece.slice(0, this.filled));
      this.clear();
    }
    this.piece.set(samples, this.filled);
    this.filled += samples.length;
    return true;
  }
}

registerProcessor("capture", Capture);
