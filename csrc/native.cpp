#include "bindings.h"

NB_MODULE(_native, m) {
    m.doc() = "Native core of equipoise: planner, shares, host routing, checksum, copier.";
    equipoise::bind_plan(m);
    equipoise::bind_planner(m);
    equipoise::bind_shares(m);
    equipoise::bind_routing(m);
    equipoise::bind_checksum(m);
    equipoise::bind_copier(m);
}
