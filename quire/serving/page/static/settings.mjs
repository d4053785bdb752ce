// The settings of a chat request: system prompt, sampling, the answer's format, tools.

import { h, newId } from "./dom.mjs";
import { ParameterPanel } from "./params.mjs";

const FORMATS = [["text", "Text"], ["json_object", "JSON object"], ["json_schema", "JSON schema"]];
const CHOICES = [["auto", "the model decides"], ["required", "at least one call"], ["none", "no calls"]];
const SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}';
const TOOLS = '[{"type": "function", "function": {"name": …}}]';

function field(label, control) {
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control);
}

function select(name, choices) {
  return h("select", { id: newId(name) }, choices.map(([value, label]) => h("option", { value }, label)));
}

function parse(input, what) {
  try {
    return JSON.parse(input.value);
  } catch (error) {
    input.focus();
    throw new Error(`${what} not valid JSON: ${error.message}`);
  }
}

export class ChatSettings {
  constructor() {
    this.system = h("textarea", { id: newId("system"), rows: 3, placeholder: "none" });
    this.systemField = field("System prompt", this.system);
    this.params = new ParameterPanel("what fits");
    this.format = select("format", FORMATS);
    this.format.addEventListener("change", () => this.showFields());
    this.schema = h("textarea", { id: newId("schema"), rows: 5, placeholder: SCHEMA, spellcheck: "false" });
    this.schemaField = field("Schema (JSON)", this.schema);
    this.tools = h("textarea", { id: newId("tools"), rows: 3, placeholder: TOOLS, spellcheck: "false" });
    this.tools.addEventListener("input", () => this.showFields());
    this.choice = select("choice", CHOICES);
    this.choiceField = field("Tool choice", this.choice);
    this.toolsField = h("div", { class: "side-body" }, field("Tools (JSON)", this.tools), this.choiceField);
    this.element = h("div", { class: "side-body" }, this.params.element, field("Response format", this.format), this.schemaField, this.toolsField);
    this.showFields();
  }

  showFields() {
    this.schemaField.hidden = this.format.value !== "json_schema";
    this.choiceField.hidden = !this.tools.value.trim();
  }

  onModel(model) {
    this.params.showDefaults(model.defaults);
    this.toolsField.hidden = !model.has_tools;
  }

  // Returns the fields of a request's body, without the messages. Throws Error for what is not valid.
  values() {
    const { max_tokens: limit, ...body } = this.params.values();
    if (limit) body.max_completion_tokens = limit;
    if (this.format.value === "json_object") body.response_format = { type: "json_object" };
    else if (this.format.value === "json_schema") {
      body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: parse(this.schema, "The schema is") } };
    }
    if (this.tools.value.trim() && !this.toolsField.hidden) {
      body.tools = parse(this.tools, "Tools are");
      if (this.choice.value !== "auto") body.tool_choice = this.choice.value;
    }
    return body;
  }
}
