// Drives MQTT.js for the tests: a command per line in, an answer or an event per line out, all JSON.
// Bytes travel as base64. Several clients at once, told apart by `client`.
'use strict'
const mqtt = require('mqtt')
const readline = require('node:readline')

const clients = new Map()
const say = (what) => process.stdout.write(JSON.stringify(what) + '\n')
const bytes = (text) => (text === undefined || text === null ? undefined : Buffer.from(text, 'base64'))

function fromWire(properties) {
  if (!properties) return {}
  const out = { ...properties }
  if (out.correlationData) out.correlationData = out.correlationData.toString('base64')
  if (out.userProperties) {
    out.userProperties = Object.entries(out.userProperties).flatMap(([key, value]) =>
      (Array.isArray(value) ? value : [value]).map((each) => [key, each]))
  }
  return out
}

function toWire(properties) {
  if (!properties) return undefined
  const out = { ...properties }
  if (out.correlationData) out.correlationData = bytes(out.correlationData)
  if (out.userProperties) {
    const grouped = {}
    for (const [key, value] of out.userProperties) (grouped[key] ??= []).push(value)
    out.userProperties = grouped
  }
  return out
}

const commands = {
  connect({ client, url, options }, answer) {
    if (options.will) {
      options.will.payload = bytes(options.will.payload)
      options.will.properties = toWire(options.will.properties)
    }
    options.properties = toWire(options.properties)
    options.ca = bytes(options.ca)
    const it = mqtt.connect(url, { reconnectPeriod: 0, connectTimeout: 10000, resubscribe: false, ...options })
    clients.set(client, it)
    it.once('connect', (connack) => answer({
      sessionPresent: connack.sessionPresent, reason: connack.reasonCode ?? connack.returnCode ?? 0,
      properties: fromWire(connack.properties)
    }))
    it.on('error', (error) => answer({ error: String(error.message), reason: error.code ?? null }))
    it.on('message', (topic, payload, packet) => say({
      client, event: 'message', topic, payload: payload.toString('base64'), qos: packet.qos, retain: packet.retain,
      dup: packet.dup, mid: packet.messageId ?? 0, properties: fromWire(packet.properties)
    }))
    it.on('disconnect', (packet) => say({ client, event: 'disconnect', reason: packet.reasonCode ?? 0 }))
    it.on('close', () => { say({ client, event: 'close' }); answer({ error: 'closed before CONNACK', reason: null }) })
  },
  subscribe({ client, filter, options }, answer) {
    options.properties = toWire(options.properties)
    clients.get(client).subscribe(filter, options, (error, granted, packet) => answer({
      error: error && !packet ? String(error.message) : undefined, reasons: packet ? packet.granted : (granted ?? []).map((g) => g.qos)
    }))
  },
  unsubscribe({ client, filter }, answer) {
    clients.get(client).unsubscribe(filter, (error, packet) => answer({
      error: error && String(error.message), reasons: (packet && packet.granted) || []
    }))
  },
  publish({ client, topic, payload, options }, answer) {
    options.properties = toWire(options.properties)
    clients.get(client).publish(topic, bytes(payload), options, (error, packet) => answer({
      error: error && String(error.message), reason: (packet && packet.reasonCode) ?? (error && error.code) ?? 0
    }))
  },
  disconnect({ client, options }, answer) {
    options.properties = toWire(options.properties)
    clients.get(client).end(false, options, () => answer({}))
  },
  drop({ client }, answer) {
    const it = clients.get(client)
    it.once('close', () => answer({}))
    it.stream.destroy()
  },
  forget({ client }, answer) {
    const it = clients.get(client)
    clients.delete(client)
    if (it) { it.removeAllListeners(); it.on('error', () => {}); it.end(true) }
    answer({})
  }
}

readline.createInterface({ input: process.stdin }).on('line', (line) => {
  const command = JSON.parse(line)
  let open = true
  const answer = (what) => { if (open) { open = false; say({ id: command.id, ...what }) } }
  try {
    commands[command.do](command, answer)
  } catch (error) {
    answer({ error: String(error.stack) })
  }
}).on('close', () => process.exit(0))
