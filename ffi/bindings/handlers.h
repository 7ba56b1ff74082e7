// The handlers' bodies and bind lines, written once; each platform instantiates them with its launcher.
#pragma once

#include <utility>

#include "bindings/unpack.h"

namespace kvcanary {

// Launcher: ffi::Error(const VerifyLaunch&).
template <typename Launcher>
ffi::Error handle_verify(Launcher launcher, Int32s slots, Int32s expected_tokens, Int32s expected_positions, Int32s prev_slots,
                         Int32s num_valid, Int32s enable, Int32s row_offsets, Int32s requests, ffi::RemainingArgs arrays,
                         ffi::RemainingRets results, Sizes tags, Sizes source_counts, Sizes source_geometry,
                         bool check_expected_token) {
  const std::string operation = "kvcanary_verify";
  const size_t capacity = slots.element_count();
  if (expected_tokens.element_count() != capacity || expected_positions.element_count() != capacity ||
      prev_slots.element_count() != capacity || num_valid.element_count() != 1 || enable.element_count() != 1 ||
      row_offsets.element_count() != requests.element_count() + 1) {
    return invalid(operation, "the arrays of the plan have different lengths.");
  }
  VerifyLaunch launch{};
  launch.slots = slots.typed_data();
  launch.expected_tokens = expected_tokens.typed_data();
  launch.expected_positions = expected_positions.typed_data();
  launch.prev_slots = prev_slots.typed_data();
  launch.num_valid = num_valid.typed_data();
  launch.enable = enable.typed_data();
  launch.row_offsets = row_offsets.typed_data();
  launch.capacity = static_cast<int64_t>(capacity);
  launch.check_expected_token = check_expected_token;
  const EndpointAttrs attrs{tags, source_counts, source_geometry};
  if (ffi::Error error = unpack_log(operation, requests, results, &launch.log); error.failure()) return error;
  if (ffi::Error error = unpack_endpoints(operation, arrays, attrs, &launch.endpoints); error.failure()) return error;
  return launcher(launch);
}

// Launcher: ffi::Error(const WriteLaunch&).
template <typename Launcher>
ffi::Error handle_write(Launcher launcher, Int32s offsets, Int32s seed_slots, Int32s num_rows, ffi::AnyBuffer tokens,
                        ffi::AnyBuffer positions, ffi::AnyBuffer slots, ffi::AnyBuffer expected_tokens,
                        ffi::AnyBuffer expected_positions, ffi::AnyBuffer parents, Int32s check_positions, Int32s requests,
                        ffi::RemainingArgs arrays, ffi::RemainingRets results, Sizes tags, Sizes source_counts,
                        Sizes source_geometry, bool check_input, bool tree) {
  const std::string operation = "kvcanary_write";
  if (offsets.element_count() != seed_slots.element_count() + 1 || num_rows.element_count() != 1 || check_positions.element_count() != 1) {
    return invalid(operation, "the arrays of the plan have unexpected lengths.");
  }
  WriteLaunch launch{};
  launch.offsets = offsets.typed_data();
  launch.seed_slots = seed_slots.typed_data();
  launch.num_rows = num_rows.typed_data();
  launch.row_capacity = static_cast<int64_t>(seed_slots.element_count());
  launch.num_tokens = static_cast<int64_t>(tokens.element_count());
  launch.check_input = check_input;
  launch.tree = tree;
  launch.check_positions = check_positions.typed_data();
  const std::pair<const ffi::AnyBuffer*, Integers*> integers[] = {{&tokens, &launch.tokens},
                                                                  {&positions, &launch.positions},
                                                                  {&slots, &launch.slots},
                                                                  {&expected_tokens, &launch.expected_tokens},
                                                                  {&expected_positions, &launch.expected_positions},
                                                                  {&parents, &launch.parents}};
  for (const auto& [array, target] : integers) {
    if (ffi::Error error = unpack_integers(operation, *array, launch.num_tokens, target); error.failure()) return error;
  }
  const EndpointAttrs attrs{tags, source_counts, source_geometry};
  if (ffi::Error error = unpack_log(operation, requests, results, &launch.log); error.failure()) return error;
  if (ffi::Error error = unpack_endpoints(operation, arrays, attrs, &launch.endpoints); error.failure()) return error;
  if (ffi::Error error = unpack_write_results(operation, results, &launch); error.failure()) return error;
  return launcher(launch);
}

// Operands, results and attributes, behind a binding that holds the platform's context.
template <typename Binding>
auto bind_verify(Binding binding) {
  return std::move(binding)
      .template Arg<Int32s>()  // slots
      .template Arg<Int32s>()  // expected_tokens
      .template Arg<Int32s>()  // expected_positions
      .template Arg<Int32s>()  // prev_slots
      .template Arg<Int32s>()  // num_valid
      .template Arg<Int32s>()  // enable
      .template Arg<Int32s>()  // row_offsets
      .template Arg<Int32s>()  // requests
      .RemainingArgs()         // log, canary buffers, sources
      .RemainingRets()         // log
      .template Attr<Sizes>("tags")
      .template Attr<Sizes>("source_counts")
      .template Attr<Sizes>("source_geometry")
      .template Attr<bool>("check_expected_token");
}

template <typename Binding>
auto bind_write(Binding binding) {
  return std::move(binding)
      .template Arg<Int32s>()          // offsets
      .template Arg<Int32s>()          // seed_slots
      .template Arg<Int32s>()          // num_rows
      .template Arg<ffi::AnyBuffer>()  // tokens
      .template Arg<ffi::AnyBuffer>()  // positions
      .template Arg<ffi::AnyBuffer>()  // slots
      .template Arg<ffi::AnyBuffer>()  // expected_tokens
      .template Arg<ffi::AnyBuffer>()  // expected_positions
      .template Arg<ffi::AnyBuffer>()  // parents
      .template Arg<Int32s>()          // check_positions
      .template Arg<Int32s>()          // requests
      .RemainingArgs()                 // log, canary buffers, sources
      .RemainingRets()                 // log, links (scratch), canary buffers
      .template Attr<Sizes>("tags")
      .template Attr<Sizes>("source_counts")
      .template Attr<Sizes>("source_geometry")
      .template Attr<bool>("check_input")
      .template Attr<bool>("tree");
}

}  // namespace kvcanary
