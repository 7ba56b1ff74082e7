// The handlers' bodies and bind lines, written once; each platform instantiates them with its launchers.
#pragma once

#include <utility>

#include "bindings/unpack.h"

namespace kvcanary {

inline ffi::Error unpack_verify(const std::string& operation, Int32s slots, Int32s expected_tokens, Int32s expected_positions,
                                Int32s prev_slots, Int32s num_valid, Int32s enable, Int32s row_offsets, Int32s requests,
                                bool check_expected_token, VerifyLaunch* launch) {
  const size_t capacity = slots.element_count();
  if (expected_tokens.element_count() != capacity || expected_positions.element_count() != capacity ||
      prev_slots.element_count() != capacity || num_valid.element_count() != 1 || enable.element_count() != 1 ||
      row_offsets.element_count() != requests.element_count() + 1) {
    return invalid(operation, "the arrays of the verify plan have different lengths.");
  }
  launch->slots = slots.typed_data();
  launch->expected_tokens = expected_tokens.typed_data();
  launch->expected_positions = expected_positions.typed_data();
  launch->prev_slots = prev_slots.typed_data();
  launch->num_valid = num_valid.typed_data();
  launch->enable = enable.typed_data();
  launch->row_offsets = row_offsets.typed_data();
  launch->capacity = static_cast<int64_t>(capacity);
  launch->check_expected_token = check_expected_token;
  return ffi::Error::Success();
}

inline ffi::Error unpack_write(const std::string& operation, Int32s offsets, Int32s seed_slots, Int32s num_rows, ffi::AnyBuffer tokens,
                               ffi::AnyBuffer positions, ffi::AnyBuffer slots, ffi::AnyBuffer expected_tokens,
                               ffi::AnyBuffer expected_positions, ffi::AnyBuffer parents, Int32s check_positions, bool check_input,
                               bool tree, WriteLaunch* launch) {
  if (offsets.element_count() != seed_slots.element_count() + 1 || num_rows.element_count() != 1 || check_positions.element_count() != 1 ||
      tokens.element_count() > INT32_MAX) {
    return invalid(operation, "the arrays of the write plan have unexpected lengths.");
  }
  launch->offsets = offsets.typed_data();
  launch->seed_slots = seed_slots.typed_data();
  launch->num_rows = num_rows.typed_data();
  launch->row_capacity = static_cast<int64_t>(seed_slots.element_count());
  launch->num_tokens = static_cast<int64_t>(tokens.element_count());
  launch->check_input = check_input;
  launch->tree = tree;
  launch->check_positions = check_positions.typed_data();
  const std::pair<const ffi::AnyBuffer*, Integers*> integers[] = {{&tokens, &launch->tokens},
                                                                  {&positions, &launch->positions},
                                                                  {&slots, &launch->slots},
                                                                  {&expected_tokens, &launch->expected_tokens},
                                                                  {&expected_positions, &launch->expected_positions},
                                                                  {&parents, &launch->parents}};
  for (const auto& [array, target] : integers) {
    if (ffi::Error error = unpack_integers(operation, *array, launch->num_tokens, target); error.failure()) return error;
  }
  return ffi::Error::Success();
}

// Launcher: ffi::Error(const VerifyLaunch&).
template <typename Launcher>
ffi::Error handle_verify(Launcher launcher, Int32s slots, Int32s expected_tokens, Int32s expected_positions, Int32s prev_slots,
                         Int32s num_valid, Int32s enable, Int32s row_offsets, Int32s requests, ffi::RemainingArgs arrays,
                         ffi::RemainingRets results, Sizes tags, Sizes source_counts, Sizes source_geometry,
                         bool check_expected_token) {
  const std::string operation = "kvcanary_verify";
  VerifyLaunch launch{};
  if (ffi::Error error = unpack_verify(operation, slots, expected_tokens, expected_positions, prev_slots, num_valid, enable, row_offsets,
                                       requests, check_expected_token, &launch);
      error.failure()) {
    return error;
  }
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
                        ffi::Result<Words> scratch, ffi::RemainingArgs arrays, ffi::RemainingRets results, Sizes tags,
                        Sizes source_counts, Sizes source_geometry, bool check_input, bool tree) {
  const std::string operation = "kvcanary_write";
  WriteLaunch launch{};
  if (ffi::Error error = unpack_write(operation, offsets, seed_slots, num_rows, tokens, positions, slots, expected_tokens,
                                      expected_positions, parents, check_positions, check_input, tree, &launch);
      error.failure()) {
    return error;
  }
  const EndpointAttrs attrs{tags, source_counts, source_geometry};
  if (ffi::Error error = unpack_log(operation, requests, results, &launch.log); error.failure()) return error;
  if (ffi::Error error = unpack_endpoints(operation, arrays, attrs, &launch.endpoints); error.failure()) return error;
  if (ffi::Error error = unpack_scratch(operation, scratch, /*has_links=*/true, &launch); error.failure()) return error;
  if (ffi::Error error = unpack_buffer_results(operation, results, kLogArrays, &launch.endpoints); error.failure()) return error;
  return launcher(launch);
}

// A phase of a step: verify, then write, then the step's report, where kReports. The first phase leaves its links as a result, the
// second one takes them.
// Launcher: ffi::Error(const VerifyLaunch&, const WriteLaunch&, const ReportLaunch&).
template <bool kReports, typename Launcher>
ffi::Error handle_phase(Launcher launcher, Int32s slots, Int32s expected_tokens, Int32s expected_positions, Int32s prev_slots,
                        Int32s num_valid, Int32s enable, Int32s row_offsets, Int32s offsets, Int32s seed_slots, Int32s num_rows,
                        ffi::AnyBuffer tokens, ffi::AnyBuffer positions, ffi::AnyBuffer out_slots, ffi::AnyBuffer expected_inputs,
                        ffi::AnyBuffer expected_input_positions, ffi::AnyBuffer parents, Int32s check_positions,
                        ffi::AnyBuffer carried_links, Int32s num_invalid_rows, Int32s reset_count, Int32s requests,
                        ffi::Result<Words> scratch, ffi::Result<Words> links, ffi::RemainingArgs arrays, ffi::RemainingRets results,
                        Sizes tags, Sizes source_counts, Sizes source_geometry, bool check_expected_token, bool check_input, bool tree,
                        bool carried) {
  const std::string operation = kReports ? "kvcanary_report_phase" : "kvcanary_phase";
  VerifyLaunch verify{};
  if (ffi::Error error = unpack_verify(operation, slots, expected_tokens, expected_positions, prev_slots, num_valid, enable, row_offsets,
                                       requests, check_expected_token, &verify);
      error.failure()) {
    return error;
  }
  WriteLaunch write{};
  if (ffi::Error error = unpack_write(operation, offsets, seed_slots, num_rows, tokens, positions, out_slots, expected_inputs,
                                      expected_input_positions, parents, check_positions, check_input, tree, &write);
      error.failure()) {
    return error;
  }
  const EndpointAttrs attrs{tags, source_counts, source_geometry};
  if (ffi::Error error = unpack_log(operation, requests, results, &verify.log); error.failure()) return error;
  if (ffi::Error error = unpack_endpoints(operation, arrays, attrs, &verify.endpoints); error.failure()) return error;
  ReportLaunch report{};
  if constexpr (kReports) {
    if (num_invalid_rows.element_count() != 1 || reset_count.element_count() != 1) {
      return invalid(operation, "the counts of a report have unexpected lengths.");
    }
    report.num_invalid_rows = num_invalid_rows.typed_data();
    report.reset_count = reset_count.typed_data();
    if (ffi::Error error = unpack_report(operation, results, kLogArrays, verify.log, &report); error.failure()) return error;
  }
  const size_t first_buffer = kLogArrays + (kReports ? kReportArrays : 0);
  if (ffi::Error error = unpack_buffer_results(operation, results, first_buffer, &verify.endpoints); error.failure()) return error;
  write.log = verify.log;
  write.endpoints = verify.endpoints;
  write.carried = carried;
  if (ffi::Error error = unpack_scratch(operation, scratch, /*has_links=*/false, &write); error.failure()) return error;
  if ((carried ? carried_links.size_bytes() : links->size_bytes()) < link_bytes(write)) return invalid(operation, "the array of links is too small.");
  unpack_links(carried ? carried_links.untyped_data() : links->untyped_data(), &write);
  return launcher(verify, write, report);
}

// Operands, results and attributes, behind a binding that holds the platform's context; first what operations share.
// By reference, since the FFI lets only its own members move a binding.
template <typename Binding>
auto bind_verify_plan(Binding&& binding) {
  return std::move(binding)
      .template Arg<Int32s>()   // slots
      .template Arg<Int32s>()   // expected_tokens
      .template Arg<Int32s>()   // expected_positions
      .template Arg<Int32s>()   // prev_slots
      .template Arg<Int32s>()   // num_valid
      .template Arg<Int32s>()   // enable
      .template Arg<Int32s>();  // row_offsets
}

template <typename Binding>
auto bind_write_entries(Binding&& binding) {
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
      .template Arg<Int32s>();         // check_positions
}

template <typename Binding>
auto bind_endpoints(Binding&& binding) {
  return std::move(binding)
      .RemainingArgs()  // log, canary buffers, sources
      .RemainingRets()  // log, report (of a phase that reports), canary buffers (where written)
      .template Attr<Sizes>("tags")
      .template Attr<Sizes>("source_counts")
      .template Attr<Sizes>("source_geometry");
}

template <typename Binding>
auto bind_verify(Binding&& binding) {
  return bind_endpoints(bind_verify_plan(std::move(binding)).template Arg<Int32s>())  // requests
      .template Attr<bool>("check_expected_token");
}

template <typename Binding>
auto bind_write(Binding&& binding) {
  return bind_endpoints(bind_write_entries(std::move(binding))
                            .template Arg<Int32s>()   // requests
                            .template Ret<Words>())  // scratch
      .template Attr<bool>("check_input")
      .template Attr<bool>("tree");
}

template <typename Binding>
auto bind_phase(Binding&& binding) {
  return bind_endpoints(bind_write_entries(bind_verify_plan(std::move(binding)))
                            .template Arg<ffi::AnyBuffer>()  // carried_links
                            .template Arg<Int32s>()          // num_invalid_rows
                            .template Arg<Int32s>()          // reset_count
                            .template Arg<Int32s>()          // requests
                            .template Ret<Words>()           // scratch
                            .template Ret<Words>())          // links
      .template Attr<bool>("check_expected_token")
      .template Attr<bool>("check_input")
      .template Attr<bool>("tree")
      .template Attr<bool>("carried");
}

}  // namespace kvcanary
