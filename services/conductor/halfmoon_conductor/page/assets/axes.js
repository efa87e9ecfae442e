// Scales and labels that charts share.

/** A round number at least as large, and the distance of its grid lines. */
export function scale(highest) {
  const unit = 10 ** Math.floor(Math.log10(highest));
  for (const [most, step] of [[1, 0.25], [1.5, 0.5], [2, 0.5], [3, 1], [4, 1], [6, 2], [8, 2], [10, 2.5]]) {
    if (highest <= most * unit * 1.0001) return [most * unit, step * unit];
  }
  return [10 * unit, 2.5 * unit];
}

/** `[seconds ago, text, anchor]` for the labels below a chart of so many seconds and pixels. */
export function timeLabels(range, width) {
  const every = { 60: 15, 300: 60, 600: 120 }[range] * (width < 460 ? 2 : 1);
  const labels = [];
  for (let back = 0; back <= range; back += every) {
    const anchor = back === 0 ? "end" : back === range ? "start" : "middle"; // within the frame
    labels.push([back, back === 0 ? "now" : back % 60 ? `−${back} s` : `−${back / 60} min`, anchor]);
  }
  return labels;
}
