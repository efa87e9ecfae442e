// Making elements. Texts become text nodes: nothing that comes over the wire is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes, listeners (`onclick`) and children; nulls are left out. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same in SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Change a text only if it differs, so that selections and readers are left in peace. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const byId = (id) => document.getElementById(id);

/**
 * Make a parent's children those of `items`, in their order. Elements are kept by key, so that
 * focus, hover and transitions outlive an update.
 */
export function keyed(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = known.get(key);
    if (child === undefined) {
      child = make(item);
      child.dataset.key = key;
    }
    known.delete(key);
    if (child !== place) parent.insertBefore(child, place);
    else place = place.nextElementSibling;
    update(child, item);
  }
  for (const gone of known.values()) gone.remove();
}
