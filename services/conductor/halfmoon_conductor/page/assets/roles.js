// The roles of workers: a switch on the card of each worker that can have both, and what is next.

import { byId, el, say } from "./dom.js";
import { seconds } from "./format.js";

const CHOICES = [["auto", "auto"], ["prefill", "prefill"], ["decode", "decode"]];

/** Whether some worker can change, so that /debug/roles has something to say. */
export const anyCanChange = ({ workers }) => workers.some((w) => (w.roles ?? []).length > 1);

/**
 * What of a card shows its role. `onSet(worker, role)` asks for another one; what it throws is shown.
 */
export function roleLine(worker, onSet) {
  const refused = el("p", { class: "role-refused", role: "alert", hidden: true });
  const select = el("select", { "aria-label": `Role of ${worker.worker_id}` },
    CHOICES.map(([value, name]) => el("option", { value }, name)));
  select.addEventListener("change", async () => {
    const chosen = select.value;
    select.disabled = true;
    refused.hidden = true;
    try {
      await onSet(worker.worker_id, chosen);
      select.dataset.known = chosen;
    } catch (error) {
      say(refused, error.message);
      refused.hidden = false;
    }
    select.value = select.dataset.known;
    select.disabled = false;
  });
  return el("div", { class: "role-line", hidden: true },
    el("label", { class: "inline" }, "role ", select),
    el("span", { class: "role-state note" }),
    refused);
}

/** Show a worker's row of /debug/roles; none: it has one role only, or nothing is known. */
export function fillRoleLine(element, row) {
  const canChange = Boolean(row && (row.roles.length > 1 || row.pinned || row.changing_to));
  element.hidden = !canChange;
  if (!canChange) return;
  const select = element.querySelector("select");
  const known = row.pinned ?? "auto";
  if (select.dataset.known !== known && !select.disabled) {
    select.dataset.known = known;
    select.value = known;
  }
  say(element.querySelector(".role-state"), roleState(row));
}

function roleState({ role, pinned, changing_to, has_begun, n_asked }) {
  const words = pinned ? [`pinned to ${pinned}`] : [];
  if (changing_to && has_begun) words.push(role ? `drains to be ${changing_to}` : `starts as ${changing_to}`);
  else if (changing_to) words.push(n_asked > 1 ? `asked ${n_asked} times for ${changing_to}` : `asked for ${changing_to}`);
  return words.join(", ");
}

/** One line below the map: the change that the conductor makes next, or why it makes none. */
export function showNextChange(roles) {
  const element = byId("roles-note");
  element.hidden = !roles;
  if (!roles) return;
  const { next, reason, rest_s } = roles;
  const rest = rest_s > 0 ? ` for ${seconds(rest_s)} at least` : "";
  say(element, next
    ? `Roles: ${next.worker_id} to ${next.to} in ${seconds(next.due_s)}, if the loads stay. ${reason}`
    : `Roles: no change${rest}. ${reason}`);
}
