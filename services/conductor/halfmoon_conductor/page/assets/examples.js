// Prompts to begin with: a long list, and questions about single lines of it. The list is the
// same each time, so from the second question on it is read from the cache. The answers are
// known: one that differs shows at a glance that the model, or its KV, is wrong.

const NAMES = (
  "Ada Juan Mia Felix Nora Hugo Zoe Ivan Clara Omar Lena Theo Rosa Kai Elsa Noah Ida Paul Vera Max " +
  "Olga Sven Luna Carl Maya Leo Ruth Ben Anna Yusuf Greta Tom Iris Jack Wanda Ravi Emma Otto Sara Finn " +
  "Gina Mark Lucy Aiko Peter Uma Dan Ella Boris Kate Simon Tara Ralph Eva Xavier Pia Louis Fiona Ken Dora " +
  "Hans Amelia George Nina Oscar Bella Victor Joy Adam Stella Martin Lisa Enzo Helen Chen Alice Roman Daisy Eric Mona"
).split(" ");

/** Four digits that look random and are the same each time. */
const numberOf = (name) => 1000 + ((NAMES.indexOf(name) * 7919 + 3821) % 9000);

const facts = NAMES.map((name) => `${name}'s number is ${numberOf(name)}.`).join(" ");
const ask = (name) => ({ text: `${facts}\nWhat is ${name}'s number?`, answer: String(numberOf(name)) });

export const EXAMPLES = [
  { name: "A list, then a question", ...ask("Leo") },
  { name: "Another question", ...ask("Vera") },
  { name: "Something short", text: "Hello, who are you?" },
];

/** What an example's answer must have in it; undefined for what people ask. */
export const answerTo = (text) => EXAMPLES.find((example) => example.text === text)?.answer;
