// Starts the page: each part registers what it listens to.

import {startChat} from "./chat.js";
import {startFrame} from "./frame.js";
import {startHistory} from "./history.js";
import {startLive} from "./live.js";
import {startOptions} from "./options.js";
import {awaitModel} from "./readiness.js";
import {startWelcome} from "./welcome.js";

startOptions();
startWelcome();
startHistory();
startChat();
startLive();
startFrame();
awaitModel();
