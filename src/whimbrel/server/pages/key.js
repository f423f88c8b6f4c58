/** Dialog that asks for the key. The key is returned and nowhere stored. */

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
      if (/^[\x21-\x7e]+$/.test(key)) finish(key);
      else wrong.textContent = key ? "A key has letters, digits and signs of ASCII, and no spaces." : "Type the key, or cancel.";
    }, { signal });
    document.getElementById("key-cancel").addEventListener("click", () => finish(""), { signal });
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      finish("");
    }, { signal });
  });
}
