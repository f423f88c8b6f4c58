/** Dialog that asks for the key. The key is returned and nowhere stored. */

import { faultOfKey } from "./api.js";

const dialog = document.getElementById("key-dialog");
const input = document.getElementById("key-input");
const wrong = document.getElementById("key-wrong");

/** Return a promise of the key that the user types, "" if none. */
export function askKey(wasWrong) {
  wrong.textContent = wasWrong ? "The server refused this key. Check it, and that it has no spaces." : "";
  input.value = "";
  if (!dialog.open) dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    const controller = new AbortController();
    const { signal } = controller;
    const finish = (key) => {
      controller.abort();
      input.value = "";
      dialog.close();
      resolve(key);
    };
    dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      const key = input.value.trim();
      wrong.textContent = key ? faultOfKey(key) : "Type the key, or cancel.";
      if (!wrong.textContent) finish(key);
    }, { signal });
    document.getElementById("key-cancel").addEventListener("click", () => finish(""), { signal });
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      finish("");
    }, { signal });
  });
}
