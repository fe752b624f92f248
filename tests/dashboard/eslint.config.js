// What eslint recommends, and what keeps text of users from becoming markup.

import js from "@eslint/js";
import globals from "globals";

const markup = ["innerHTML", "outerHTML", "insertAdjacentHTML", "dangerouslySetInnerHTML"];

export default [
  { ignores: ["page/vendor/**"] },
  js.configs.recommended,
  {
    languageOptions: { globals: globals.browser },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      eqeqeq: "error",
      "no-control-regex": "off", // they are what is taken out of logs
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-shadow": "error",
      "no-var": "error",
      "prefer-const": "error",
      "no-restricted-properties": ["error", ...markup.map((property) => ({ property }))],
      "no-unused-vars": ["error", { argsIgnorePattern: "^_" }],
      "max-lines": ["error", 450],
    },
  },
];
