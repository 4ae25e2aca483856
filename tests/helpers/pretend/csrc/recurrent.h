// The cells of LSTM and GRU, which PyTorch asks of an accelerator and the CPU has no kernel for.
#pragma once

#include "kernels.h"

namespace pretend {

using Optional = std::optional<at::Tensor>;

inline at::Tensor with_bias(Call& call, const at::Tensor& gates, const Optional& bias) {
  auto cpu = call.in(gates);
  return bias && bias->defined() ? cpu + call.in(*bias) : cpu;
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cell, const Optional& input_bias,
    const Optional& hidden_bias) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Call call("aten::_thnn_fused_lstm_cell");
  auto gates = with_bias(call, input_gates, input_bias) + with_bias(call, hidden_gates, hidden_bias);
  auto before = call.in(cell);
  call.start();
  auto parts = gates.chunk(4, 1);
  auto i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  auto after = f * before + i * g;
  return {call.out(o * after.tanh()), call.out(after), call.out(at::cat({i, f, g, o}, 1))};
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const Optional& grad_hidden, const Optional& grad_cell, const at::Tensor& cell, const at::Tensor& new_cell,
    const at::Tensor& workspace, bool has_bias) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Call call("aten::_thnn_fused_lstm_cell_backward_impl");
  auto before = call.in(cell), after = call.in(new_cell), gates = call.in(workspace);
  auto dh = grad_hidden && grad_hidden->defined() ? call.in(*grad_hidden) : at::zeros_like(after);
  auto dc = grad_cell && grad_cell->defined() ? call.in(*grad_cell) : at::zeros_like(after);
  call.start();
  auto parts = gates.chunk(4, 1);
  auto i = parts[0], f = parts[1], g = parts[2], o = parts[3];
  auto t = after.tanh();
  auto total = dc + dh * o * (1 - t * t);
  auto grad = at::cat({total * g * i * (1 - i), total * before * f * (1 - f), total * i * (1 - g * g), dh * t * o * (1 - o)}, 1);
  auto bias = has_bias ? call.out(grad.sum(0)) : at::Tensor();
  return {call.out(grad), call.out(total * f), bias};
}

inline std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                                   const at::Tensor& hidden, const Optional& input_bias,
                                                   const Optional& hidden_bias) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Call call("aten::_thnn_fused_gru_cell");
  auto x = with_bias(call, input_gates, input_bias).chunk(3, 1), h = with_bias(call, hidden_gates, hidden_bias).chunk(3, 1);
  auto before = call.in(hidden);
  call.start();
  auto r = (x[0] + h[0]).sigmoid(), z = (x[1] + h[1]).sigmoid();
  auto n = (x[2] + r * h[2]).tanh();
  return {call.out(n + z * (before - n)), call.out(at::cat({r, z, n, before, h[2]}, 1))};
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad_hidden, const at::Tensor& workspace, bool has_bias) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Call call("aten::_thnn_fused_gru_cell_backward");
  auto dh = call.in(grad_hidden), saved = call.in(workspace);
  call.start();
  auto parts = saved.chunk(5, 1);
  auto r = parts[0], z = parts[1], n = parts[2], before = parts[3], hn = parts[4];
  auto dn = dh * (1 - z) * (1 - n * n), dz = dh * (before - n) * z * (1 - z), dr = dn * hn * r * (1 - r);
  auto input = at::cat({dr, dz, dn}, 1), recurrent = at::cat({dr, dz, dn * r}, 1);
  auto none = at::Tensor();
  return {call.out(input), call.out(recurrent), call.out(dh * z), has_bias ? call.out(input.sum(0)) : none,
          has_bias ? call.out(recurrent.sum(0)) : none};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
}

} // namespace pretend
