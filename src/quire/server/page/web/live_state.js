// What the live view knows: the last answer of the server, and what the reader points at.

export const live = {
  seen: null,     // the last state
  cells: [],      // of the block map
  steps: [],
  late: 0,        // ms since the state was taken
  chosen: null,   // the request under the pointer
  engine: 0,      // which of several engines is shown
};

export const count = number => Math.round(number).toLocaleString("en");

export function bytes(number) {
  for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (number >= unit) return (number / unit).toFixed(number >= 100 * unit ? 0 : number >= 10 * unit ? 1 : 2) + " " + name;
  }
  return number + " B";
}
