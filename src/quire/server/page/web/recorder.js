// Records the microphone as a WAV file of 16,000 samples a second and one channel, which the server reads without a package.

const RATE = 16000;
const WHY = {
  NotAllowedError: "the browser does not allow this page to use the microphone",
  NotFoundError: "there is no microphone",
  NotReadableError: "another program uses the microphone",
};

// Begin; `heard(seconds, peak)` after each piece. Returns {stop, cancel}: `stop()` gives the file. Raises an Error with the reason.
export async function record(heard) {
  if (!navigator.mediaDevices) throw new Error("browsers allow the microphone only to pages of https, or of localhost");
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({audio: {channelCount: 1}});
  } catch (error) {
    throw new Error(WHY[error.name] ?? error.message);
  }
  const context = new AudioContext(), pieces = [];
  const release = () => {
    for (const track of stream.getTracks()) track.stop();
    context.close();
  };
  try {
    await context.audioWorklet.addModule("ui/page/capture.js");
  } catch (error) {
    release();
    throw error;
  }
  const node = new AudioWorkletNode(context, "capture");
  context.createMediaStreamSource(stream).connect(node).connect(context.destination);  // its output is silence
  let count = 0, ended = null;
  node.port.onmessage = ({data}) => {
    if (data === null) { ended?.(); return; }
    pieces.push(data);
    count += data.length;
    heard(count / context.sampleRate, data.reduce((peak, value) => Math.max(peak, Math.abs(value)), 0));
  };
  const stop = async () => {
    const last = new Promise(resolve => { ended = resolve; });
    node.port.postMessage("end");
    await last;
    const {sampleRate} = context;
    release();
    return wav(await resampled(pieces, count, sampleRate));
  };
  return {stop, cancel: release};
}

async function resampled(pieces, count, rate) {
  if (!count) return new Float32Array(0);
  const offline = new OfflineAudioContext(1, Math.ceil(count * RATE / rate), RATE), buffer = offline.createBuffer(1, count, rate);
  let at = 0;
  for (const piece of pieces) {
    buffer.copyToChannel(piece, 0, at);
    at += piece.length;
  }
  const source = new AudioBufferSourceNode(offline, {buffer});
  source.connect(offline.destination);
  source.start();
  return (await offline.startRendering()).getChannelData(0);
}

// A file of 16-bit samples: RIFF, its format, its data.
function wav(samples) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, letters) => { for (let i = 0; i < letters.length; i++) view.setUint8(at + i, letters.charCodeAt(i)); };
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);  // PCM
  view.setUint16(22, 1, true);
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((value, i) => view.setInt16(44 + 2 * i, Math.round(32767 * Math.max(-1, Math.min(1, value))), true));
  return new Blob([view], {type: "audio/wav"});
}
