/** Tabs by the WAI-ARIA pattern: one stop of the Tab key, arrows, Home and End move, the panel follows the focus. */

import { h } from "./dom.js";

/**
 * Fill a `tablist` and `panels` with tabs of {id, title, reason, panel}. A tab with a `reason` cannot be opened and says why.
 * `onopen(id)` is called when one opens. Return {open(id), current()}.
 */
export function makeTabs(list, panels, tabs, onopen) {
  let current = null;
  const note = h("p", { class: "tab-note small muted", role: "status" });
  const buttons = tabs.map(({ id, title, reason }) =>
    h(
      "button",
      {
        class: "tab", role: "tab", type: "button", id: `tab-${id}`, "aria-controls": `panel-${id}`, "aria-selected": "false",
        "aria-disabled": reason ? "true" : undefined, tabindex: "-1", title: reason, onclick: () => open(id),
      },
      title,
      reason && h("span", { class: "visually-hidden" }, ` (${reason})`),
    ),
  );
  tabs.forEach(({ id, panel }) => {
    panel.id = `panel-${id}`;
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-labelledby", `tab-${id}`);
    panel.hidden = true;
  });
  list.replaceChildren(...buttons);
  if (list.nextElementSibling?.classList.contains("tab-note")) list.nextElementSibling.remove();
  list.after(note);
  panels.replaceChildren(...tabs.map(({ panel }) => panel));
  list.addEventListener("keydown", move);

  function open(id) {
    const index = tabs.findIndex((tab) => tab.id === id);
    if (index < 0) return;
    buttons[index].focus({ preventScroll: true });
    note.textContent = tabs[index].reason ? `${tabs[index].title}: ${tabs[index].reason}` : "";
    if (!tabs[index].reason) select(index);
  }

  function select(index) {
    buttons.forEach((button, place) => {
      button.setAttribute("aria-selected", String(place === index));
      button.tabIndex = place === index ? 0 : -1;
      tabs[place].panel.hidden = place !== index;
    });
    const box = list.getBoundingClientRect();
    const own = buttons[index].getBoundingClientRect();
    if (own.left < box.left || own.right > box.right) list.scrollLeft += own.left - box.left - 24;
    current = tabs[index].id;
    onopen(current);
  }

  function move(event) {
    const place = buttons.indexOf(document.activeElement);
    const last = buttons.length - 1;
    const targets = { ArrowRight: place === last ? 0 : place + 1, ArrowLeft: place === 0 ? last : place - 1, Home: 0, End: last };
    if (place < 0 || !(event.key in targets) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    open(tabs[targets[event.key]].id);
  }

  return {
    open,
    /** Open a tab without taking the focus. */
    start: (id) => select(Math.max(0, tabs.findIndex((tab) => tab.id === id && !tab.reason))),
    current: () => current,
  };
}
