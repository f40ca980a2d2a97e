"use strict";
// Shows /openapi.json: each route with its parameters, its body and its answers, then every named type.

const log = document.getElementById("log");

function add(parent, tag, text) {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  parent.append(element);
  return element;
}

// A type in a few words; named types are explained in the second part of the page.
function typeName(schema) {
  if (!schema) return "anything";
  if (schema.$ref) return schema.$ref.split("/").pop();
  const options = schema.anyOf || schema.oneOf || schema.allOf;
  if (options) return options.map(typeName).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array") return `list of ${typeName(schema.items)}`;
  const limits = ["minimum", "exclusiveMinimum", "maximum", "minLength", "maxLength"]
    .filter((name) => name in schema).map((name) => `${name} ${schema[name]}`);
  return [schema.type || "anything", ...limits].join(", ");
}

function addFields(parent, schema) {
  if (schema.description) add(parent, "p", schema.description);
  const list = add(parent, "ul");
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const required = (schema.required || []).includes(name) ? " (required)" : "";
    const what = field.description ? `. ${field.description}` : "";
    add(list, "li", `${name}${required}: ${typeName(field)}${what}`);
  }
}

function addRoute(method, path, route) {
  const details = add(log, "details");
  add(details, "summary", `${method.toUpperCase()} ${path}: ${route.summary || ""}`);
  const list = add(details, "ul");
  for (const parameter of route.parameters || []) {
    add(list, "li", `${parameter.in} parameter ${parameter.name}: ${typeName(parameter.schema)}`);
  }
  const body = route.requestBody && route.requestBody.content["application/json"];
  if (body) add(list, "li", `body: ${typeName(body.schema)}`);
  for (const [status, answer] of Object.entries(route.responses)) {
    const content = answer.content && answer.content["application/json"];
    add(list, "li", `${status}: ${content ? typeName(content.schema) : answer.description}`);
  }
}

async function show() {
  const response = await fetch("/openapi.json");
  if (!response.ok) throw new Error(`/openapi.json answered ${response.status}`);
  const description = await response.json();
  document.getElementById("state").textContent = `version ${description.info.version}`;
  add(log, "h2", "Routes");
  for (const [path, methods] of Object.entries(description.paths)) {
    for (const [method, route] of Object.entries(methods)) addRoute(method, path, route);
  }
  add(log, "h2", "Types");
  for (const [name, schema] of Object.entries(description.components.schemas)) {
    const details = add(log, "details");
    add(details, "summary", name);
    addFields(details, schema);
  }
}

show().catch((error) => { document.getElementById("state").textContent = error.message; });
