// What every view is written with: Preact's hooks, and `html`, which makes elements of a template. Text of users goes through
// `${...}`, which never becomes markup.

import htm from "./vendor/htm.js";
import { Fragment, h, render } from "./vendor/preact.js";

export { Fragment, render };
export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";

export const html = htm.bind(h);
