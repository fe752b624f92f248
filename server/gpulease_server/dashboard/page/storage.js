// What this tab and this device keep. Where the browser lets a page keep nothing, as with all cookies blocked, it is kept until
// the page is closed.

/** @param {() => Storage} find */
function storage(find) {
  try {
    return find();
  } catch {
    const values = new Map();
    return {
      getItem: (name) => values.get(name) ?? null,
      setItem: (name, text) => values.set(name, text),
      removeItem: (name) => values.delete(name),
    };
  }
}

export const ofTab = storage(() => sessionStorage);
export const ofDevice = storage(() => localStorage);
