// Numbers as people read them.

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100) return `${Math.round(value)} s`;
  if (value >= 1) return `${value.toFixed(value >= 10 ? 1 : 2)} s`;
  if (value >= 0.01) return `${Math.round(value * 1000)} ms`;
  return value === 0 ? "0 ms" : `${(value * 1000).toFixed(1)} ms`;
}

export function ago(value) {
  if (value < 1.5) return "now";
  if (value < 60) return `${Math.round(value)} s ago`;
  if (value < 3600) return `${Math.round(value / 60)} min ago`;
  return `${Math.round(value / 3600)} h ago`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; value >= 1024 && i < units.length - 1; i++) value /= 1024;
  return `${value >= 100 || i === 0 ? Math.round(value) : value.toFixed(1)} ${units[i]}`;
}

export const count = (value) => Math.round(value).toLocaleString("en-US");

export const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

/** The end of an id, which tells requests apart; its beginning is the same for all. */
export function shortId(id) {
  const [first, attempt] = id.split("~");
  const name = first.includes("-") ? first.slice(first.indexOf("-") + 1) : first;
  return name.slice(0, 8) + (attempt ? ` · try ${attempt}` : "");
}
